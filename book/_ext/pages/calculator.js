// The form of report/pages/calculator.py: what a training needs and how long a step
// takes at least, by layouts.js.
globalThis.a2Calculator = (() => {
  const { grouped, shown } = globalThis.a2Forms;
  const WIDTH = 360, LEFT = 4, RIGHT = 356;
  const gb = (bytes) => `${shown(bytes / 1e9)} GB`;
  const three = (value) => shown(Number(value.toPrecision(3)));
  function seconds(s) {
    if (s < 1e-4) return `${shown(1e6 * s)} µs`;
    return s < 0.1 ? `${shown(1e3 * s)} ms` : `${shown(s)} s`;
  }
  const percent = (share) => `${shown(100 * share)} %`;
  const counted = (n, one) => `${grouped(n)} ${one}${n === 1 ? "" : "s"}`;

  const OPTIONS = { d_model: "d-model", d_ff: "d-ff", num_layers: "layers", num_heads: "heads",
    num_kv_heads: "kv-heads", vocab_size: "vocab", experts: "experts", top_k: "top-k",
    shared: "shared", dense: "dense", nodes: "nodes", head_size: "head-size", q_rank: "q-rank",
    kv_rank: "kv-rank", rope: "rope" };
  const SIZES = Object.keys(OPTIONS);

  // What is typed as job and layout. The devices that no other axis takes are those of data.
  function read(given, constants) {
    const shape = Object.fromEntries(SIZES.map((name) => [name, given[name]]));
    shape.tied = given.tied === "tied";
    const { tensor, pipeline, context_parallel, microbatches, chunks, expert } = given;
    const { sharding, checkpointing, schedule } = given;
    const others = tensor * pipeline * context_parallel, data = given.devices / others;
    const job = {
      shape, device: constants.devices[given.device], devices: given.devices,
      batch: given.batch_of === "each" ? given.batch * data : given.batch,
      context: given.context, headroom: given.headroom, precision: given.precision,
      attention: given.attention, optimizer: given.optimizer, efficiency: given.efficiency,
      activations: given.activations, frozen: given.frozen,
    };
    const layout = { data, tensor, pipeline, context: context_parallel, microbatches, sharding,
      checkpointing, chunks, expert, schedule, sequence: given.sequence !== "whole" };
    return { job, layout, others };
  }

  // When a device is fullest, in words.
  const MOMENTS = {
    accumulating: "in a micro-batch's backward, with the gradients of all",
    loss: "at the loss: all activations are there, and no gradient yet",
    "first block's backward": "in the first block's backward: gradients come as activations go",
    "last block's backward": "in the last block's backward: most activations are gone",
    "after the backward": "after the backward: gradients are there, activations gone",
  };

  // The fields that a rule is about, by the name it has in layouts.js.
  const OTHERS = ["tensor", "pipeline", "context_parallel"];
  const FIELDS = {
    num_heads: ["num_heads", "d_model"],
    precision: ["precision", "device"],
    data: ["batch", "devices", ...OTHERS],
    num_kv_heads: ["num_kv_heads", "num_heads"],
    tensor: ["tensor", "num_heads", "num_kv_heads", "d_ff", "vocab_size", "experts"],
    pipeline: ["pipeline", "num_layers", "dense"],
    chunks: ["chunks", "pipeline", "microbatches"],
    schedule: ["schedule", "pipeline", "chunks", "microbatches"],
    expert: ["expert", "experts", "sharding", "devices", ...OTHERS],
    experts: ["experts", "top_k", "shared", "d_ff", "dense", "num_layers"],
    context: ["context_parallel", "context", "attention"],
    microbatches: ["microbatches", "batch", "devices", ...OTHERS],
  };
  // A rule is said under the field of its own that was set last, or else under the first.
  function wrong(rule, fields, recent) {
    return { wrong: { [recent.find((name) => fields.includes(name)) ?? fields[0]]: rule } };
  }

  function respond(theory, constants, given, recent = []) {
    const { job, layout, others } = read(given, constants);
    if (!Number.isInteger(layout.data))
      return wrong(`${grouped(job.devices)} is not a multiple of the ${grouped(others)} devices of `
        + "tensor × pipeline × context; it must be", ["devices", ...OTHERS], recent);
    const broken = theory.problem(job, layout);
    if (broken) return wrong(broken.rule, FIELDS[broken.name] ?? [broken.name], recent);
    const plan = theory.evaluate(job, layout), most = theory.largest_batch(job, layout);
    return {
      out: answers(theory, job, layout, plan, most),
      drawings: { memory: memoryBar(theory, job, plan), time: timeBars(plan) },
      said: state(theory, job, layout, plan, most),
      verdict: verdict(theory, job, plan),
    };
  }

  // Changes of [job, layout] that may make room, the cheapest first: their words for what came of
  // them, and the ones to try.
  const ofJob = (part) => ([job, layout]) => [[{ ...job, ...part }, layout]];
  const ofLayout = (part) => ([job, layout]) => [[job, { ...layout, ...part }]];
  const more = (axis) => ([job, layout]) => [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].map((k) =>
    [{ ...job, devices: k * job.devices }, { ...layout, [axis]: k * layout[axis] }]);
  const CHANGES = [
    [() => "flash attention", ofJob({ attention: "flash" })],
    [() => "bf16", ofJob({ precision: "bf16" })],
    [() => "checkpointing each block", ofLayout({ checkpointing: "block" })],
    [() => "a sharded optimizer (zero1)", ofLayout({ sharding: "zero1" })],
    [() => "FSDP", ofLayout({ sharding: "fsdp" })],
    [([job]) => `${grouped(job.devices)} devices`, more("data")],
    [([job, { tensor }]) => `tensor parallelism over ${tensor} of ${grouped(job.devices)} devices`,
      more("tensor")],
  ];
  // The largest batch, or 0 where a rule is broken even with one sequence of a rank at a time.
  function room(theory, [job, layout]) {
    const least = { ...job, batch: layout.data * layout.microbatches };
    return theory.problem(least, layout) ? 0 : theory.largest_batch(job, layout);
  }
  // What makes room where no batch fits: each change that does alone, and where none does that keeps
  // the devices, some together.
  function remedies(theory, job, layout) {
    const fits = (one) => room(theory, one) > 0;
    const first = (from, make) => make(from).find(fits) ?? make(from)[0];
    const all = (changes) => changes.reduce((from, [, make]) => first(from, make), [job, layout]);
    function together(changes) {
      const enough = changes.findIndex((_, i) => fits(all(changes.slice(0, i + 1))));
      let needed = changes.slice(0, enough + 1);
      for (const change of needed) {
        const fewer = needed.filter((one) => one !== change);
        if (fits(all(fewer))) needed = fewer;
      }
      return needed.length ? [needed] : [];
    }
    const same = CHANGES.slice(0, -2);
    const alone = CHANGES.filter((change) => fits(all([change])));
    let ways = alone.map((change) => [change]);
    if (!alone.some((change) => same.includes(change))) ways = [...together(same), ...ways];
    if (!ways.length) ways = together(CHANGES);
    if (!ways.length) return "Neither sharding, checkpointing nor more devices make room: a "
      + "sequence has too many tokens, or a block too many weights, for one device";
    const words = ways.map((changes) => [changes.map(([said]) => said(all(changes))).join(" and "),
      counted(room(theory, all(changes)), "sequence")]);
    return `Room is made by ${words.map((one) => `${one[0]} (at most ${one[1]} a step)`)
      .join(", or by ")}`;
  }

  // Every answer, by the name that its cell has in the form.
  function answers(theory, job, layout, plan, most) {
    const out = {}, total = theory.memory_bytes(plan.memory);
    for (const [name, bytes] of Object.entries(plan.memory)) {
      out[`memory.${name}.gb`] = shown(bytes / 1e9);
      out[`memory.${name}.share`] = percent(bytes / total);
    }
    out["memory.total.gb"] = shown(total / 1e9);
    out["memory.total.share"] = percent(1);
    out["memory.moment"] = MOMENTS[plan.moment];
    out["memory.allowed.gb"] = shown(theory.allowed(job) / 1e9);
    for (const [name, s] of Object.entries(plan.busy)) {
      out[`busy.${name}.s`] = shown(s);
      out[`busy.${name}.share`] = percent(s / plan.step_s);
    }
    for (const [name, s] of [["floor", plan.step_s],
      ["expected", plan.expected_s], ["serial", plan.serial_s]]) {
      out[`speed.step.${name}`] = seconds(s);
      out[`speed.tokens.${name}`] = three(theory.tokens_per_s(job, s));
      out[`speed.mfu.${name}`] = percent(theory.flops_share(job, layout, s));
    }
    out["batch.most"] = grouped(most);
    out["batch.each"] = grouped(most / layout.data);
    out["batch.now"] = grouped(job.batch);
    out.parameters = shown(theory.parameter_count(job.shape) / 1e9);
    out.command = command(job, layout);
    return out;
  }

  // All of it in words.
  function state(theory, job, layout, plan, most) {
    const total = theory.memory_bytes(plan.memory), may = theory.allowed(job);
    const fits = total <= may;
    const largest = most ? `at most ${counted(most, "sequence")} a step would`
      : `no batch would. ${remedies(theory, job, layout)}`;
    const kind = counted(job.devices, "device");
    return `${fits ? "It fits" : "It does not fit"}: each of ${kind} holds ${gb(total)} of the `
      + `${gb(may)} allowed; ${largest}. A step of ${counted(job.batch, "sequence")} takes at least `
      + `${seconds(plan.step_s)}, bound by ${plan.bound}: at most `
      + `${three(theory.tokens_per_s(job, plan.step_s))} tokens a second, `
      + `${percent(theory.flops_share(job, layout, plan.step_s))} of the peak; `
      + `${seconds(plan.expected_s)} if tensor's, context's and experts' messages are waited for, `
      + `${seconds(plan.serial_s)} if all are.`;
  }

  function verdict(theory, job, plan) {
    const total = theory.memory_bytes(plan.memory), may = theory.allowed(job);
    return `${total <= may ? "It fits" : "It does not fit"}: ${gb(total)} of ${gb(may)} a device; `
      + `a step in at least ${seconds(plan.step_s)}.`;
  }

  // A share of a hundred without what binary fractions leave of it.
  const plain = (share) => Number(share.toPrecision(12));

  // The command that prints the same figures.
  function command(job, layout) {
    const sizes = SIZES.filter((name) => job.shape[name])
      .map((name) => [OPTIONS[name], job.shape[name]]);
    const options = {
      ...Object.fromEntries(sizes), device: job.device.name, devices: job.devices, batch: job.batch, context: job.context, headroom: plain(job.headroom),
      efficiency: plain(job.efficiency), precision: job.precision, attention: job.attention,
      optimizer: job.optimizer, activations: job.activations, frozen: plain(job.frozen), data: layout.data, tensor: layout.tensor,
      pipeline: layout.pipeline, "context-parallel": layout.context,
      microbatches: layout.microbatches, sharding: layout.sharding,
      checkpointing: layout.checkpointing, chunks: layout.chunks, expert: layout.expert,
      schedule: layout.schedule,
    };
    const words = Object.entries(options).map(([name, value]) => `--${name} ${value}`);
    if (job.shape.tied) words.push("--tied");
    if (!layout.sequence) words.push("--no-sequence-parallel");
    return `python -m a2lib.theory plan --as-given ${words.join(" ")}`;
  }

  const box = (x, y, width, height, kind) =>
    `<rect class="${kind}" x="${x.toFixed(1)}" y="${y}" width="${width.toFixed(1)}" height="${height}"/>`;
  const line = (x, y, height, kind) =>
    `<path class="${kind}" d="M${x.toFixed(1)} ${y}v${height}"/>`;
  const text = (x, y, words, anchor) =>
    `<text x="${x.toFixed(1)}" y="${y}" text-anchor="${anchor}">${words}</text>`;

  // A bar of the components one after another, and lines where the device and what is allowed end.
  function memoryBar(theory, job, plan) {
    const total = theory.memory_bytes(plan.memory), may = theory.allowed(job);
    const end = Math.max(total, job.device.memory);
    const x = (bytes) => LEFT + ((RIGHT - LEFT) * bytes) / end;
    const parts = [box(LEFT, 24, x(job.device.memory) - LEFT, 34, "room")];
    let from = 0;
    Object.values(plan.memory).forEach((bytes, i) => {
      parts.push(box(x(from), 24, x(from + bytes) - x(from), 34, `part${i}`));
      from += bytes;
    });
    // The two names stand on either side of the bar, so that they never touch.
    const anchor = (px) => (px > WIDTH / 2 ? "end" : "start");
    const [device, share] = [x(job.device.memory), x(may)];
    parts.push(line(share, 18, 44, "limit"), line(device, 20, 52, "whole"));
    parts.push(text(share, 13, `allowed ${gb(may)}`, anchor(share)));
    parts.push(text(device, 86, `the device has ${gb(job.device.memory)}`, anchor(device)));
    return parts.join("");
  }

  // A bar of each thing that may bind, and the line where the step ends.
  function timeBars(plan) {
    const start = 126, end = Math.max(plan.step_s, ...Object.values(plan.busy));
    const x = (s) => start + ((RIGHT - 66 - start) * s) / end;
    const parts = [], rows = Object.entries(plan.busy);
    rows.forEach(([name, s], i) => {
      const y = 8 + 26 * i;
      parts.push(text(start - 8, y + 14, name, "end"));
      parts.push(box(start, y, x(s) - start, 18, name === plan.bound ? "binds" : "waits"));
    });
    parts.push(line(x(plan.step_s), 2, 26 * rows.length + 6, "limit"));
    parts.push(text(x(plan.step_s) + 5, 14, seconds(plan.step_s), "start"));
    return parts.join("");
  }

  for (const root of document.querySelectorAll(".a2-calculator")) {
    const constants = JSON.parse(root.querySelector("script.a2-constants").textContent);
    const theory = globalThis.a2Layouts(constants);
    globalThis.a2Forms.start(root, (given, recent) => respond(theory, constants, given, recent));
  }

  return { respond, read, remedies, memoryBar, timeBars };
})();
