// The form of report/chapters/parallelism/calculator.py: what a training needs and how long a step
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

  // What is typed as job and layout. The devices that no other axis takes are those of data.
  function read(given, constants) {
    const { d_model, d_ff, num_layers, num_heads, vocab_size } = given;
    const { tensor, pipeline, context_parallel, microbatches, sharding, checkpointing } = given;
    const others = tensor * pipeline * context_parallel, data = given.devices / others;
    const job = {
      shape: { d_model, d_ff, num_layers, num_heads, vocab_size },
      device: constants.devices[given.device], devices: given.devices,
      batch: given.batch_of === "each" ? given.batch * data : given.batch,
      context: given.context, headroom: given.headroom, precision: given.precision,
      attention: given.attention, optimizer: given.optimizer, efficiency: given.efficiency,
    };
    const layout =
      { data, tensor, pipeline, context: context_parallel, microbatches, sharding, checkpointing };
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

  // The field that a rule is about, by the name it has in layouts.js.
  const FIELD = { data: "devices", context: "context_parallel" };

  function respond(theory, constants, given) {
    const { job, layout, others } = read(given, constants);
    if (!Number.isInteger(layout.data))
      return { wrong: { devices: `${grouped(job.devices)} is not a multiple of the `
        + `${grouped(others)} devices of tensor × pipeline × context; it must be` } };
    const broken = theory.problem(job, layout);
    if (broken) {
      const name = broken.name === "context" && job.attention === "eager"
        && job.context % (2 * layout.context) === 0 ? "attention" : FIELD[broken.name];
      return { wrong: { [name ?? broken.name]: broken.rule } };
    }
    const plan = theory.evaluate(job, layout), most = theory.largest_batch(job, layout);
    return {
      out: answers(theory, job, layout, plan, most),
      drawings: { memory: memoryBar(theory, job, plan), time: timeBars(plan) },
      said: state(theory, job, layout, plan, most),
    };
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
    for (const [name, s] of [["floor", plan.step_s], ["serial", plan.serial_s]]) {
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
    const room = most ? `at most ${counted(most, "sequence")} a step would` : "no batch would";
    const kind = counted(job.devices, "device");
    return `${fits ? "It fits" : "It does not fit"}: each of ${kind} holds ${gb(total)} of the `
      + `${gb(may)} allowed; ${room}. A step of ${counted(job.batch, "sequence")} takes at least `
      + `${seconds(plan.step_s)}, bound by ${plan.bound}: at most `
      + `${three(theory.tokens_per_s(job, plan.step_s))} tokens a second, `
      + `${percent(theory.flops_share(job, layout, plan.step_s))} of the peak; `
      + `${seconds(plan.serial_s)} if no communication hides.`;
  }

  // A share of a hundred without what binary fractions leave of it.
  const plain = (share) => Number(share.toPrecision(12));

  // The command that prints the same figures.
  function command(job, layout) {
    const { shape } = job, options = {
      "d-model": shape.d_model, "d-ff": shape.d_ff, layers: shape.num_layers,
      heads: shape.num_heads, vocab: shape.vocab_size, device: job.device.name,
      devices: job.devices, batch: job.batch, context: job.context, headroom: plain(job.headroom),
      efficiency: plain(job.efficiency), precision: job.precision, attention: job.attention,
      optimizer: job.optimizer, data: layout.data, tensor: layout.tensor,
      pipeline: layout.pipeline, "context-parallel": layout.context,
      microbatches: layout.microbatches, sharding: layout.sharding,
      checkpointing: layout.checkpointing,
    };
    const words = Object.entries(options).map(([name, value]) => `--${name} ${value}`);
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
    globalThis.a2Forms.start(root, (given) => respond(theory, constants, given));
  }

  return { respond, read, memoryBar, timeBars };
})();
