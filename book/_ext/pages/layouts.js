// The formulas of src/a2lib/theory/layouts.py, jobs.py and planner.py (largest_batch) for a page.
// Names, arguments and order of arithmetic are those of the Python twins, and so is every result:
// the tests compare both. Constants come from Python: report/chapters/parallelism/calculator.py.
// A job is { shape, device, devices, batch, context, headroom, precision, attention, optimizer,
// efficiency }, a layout { data, tensor, pipeline, context, microbatches, sharding, checkpointing }.
globalThis.a2Layouts = (constants) => {
  const { WIDE, NARROW, LOGIT_TENSORS, SCORE_TENSORS, OPTIMIZERS } = constants;
  const AXES = ["data", "tensor", "pipeline", "context"];

  const head_dim = (shape) => shape.d_model / shape.num_heads;
  const allowed = (job) => (1 - job.headroom) * job.device.memory;
  const peak = (job) => (job.precision === "bf16" ? job.device.flops : job.device.fp32);
  const rate = (job) => job.efficiency * peak(job);
  const element = (job) => (job.precision === "bf16" ? NARROW : WIDE);
  const update_bytes = (job) => 3 * WIDE + 2 * OPTIMIZERS[job.optimizer];
  const scores = (job) => (job.attention === "eager" ? job.shape.num_heads * job.context : 0);
  const devices = (layout) => layout.data * layout.tensor * layout.pipeline * layout.context;
  const shards = (layout) => layout.data * layout.context;
  const sum = (values) => values.reduce((total, one) => total + one, 0);
  const memory_bytes = (held) => sum(Object.values(held));

  // saved.py by its coefficients: bytes that a token leaves whole on, and cut over, tensor's devices.
  function saved(job) {
    const { whole, cut } = constants.saved[job.attention][job.precision];
    const { d_model, d_ff, num_heads } = job.shape;
    return [
      whole.d_model * d_model + whole.one,
      cut.d_model * d_model + cut.d_ff * d_ff + cut.num_heads * num_heads
        + cut.scores * num_heads * job.context,
    ];
  }

  function parameter_count({ d_model, d_ff, num_layers, vocab_size }) {
    const block = 4 * d_model ** 2 + 3 * d_model * d_ff + 2 * d_model;
    return num_layers * block + 2 * vocab_size * d_model + d_model;
  }

  function cut_by_axis(job) {
    const { num_heads, d_ff, vocab_size, num_layers } = job.shape;
    return {
      data: { batch: job.batch },
      tensor: { num_heads, d_ff, vocab_size },
      pipeline: { num_layers },
      context: { "context length": job.context },
    };
  }

  // The first rule that a job and its layout break, as { name, rule }, or null. Sizes are positive
  // whole numbers and names are known: the form sees to that.
  function problem(job, layout) {
    const { shape, device } = job;
    const no = (name, rule) => ({ name, rule });
    if (shape.d_model % shape.num_heads)
      return no("num_heads", `num_heads ${shape.num_heads} does not divide d_model ${shape.d_model}; `
        + "d_model must be a whole multiple of num_heads");
    if (head_dim(shape) % 2)
      return no("num_heads", `head_dim is ${head_dim(shape)} (d_model ${shape.d_model} / num_heads `
        + `${shape.num_heads}); RoPE turns pairs, so head_dim must be even`);
    if (job.precision === "fp32" && device.fp32 === null)
      return no("precision", `precision fp32: allowed is bf16 on ${device.slug}, whose maker states `
        + "no rate in fp32");
    for (const axis of AXES) {
      const size = layout[axis];
      for (const [name, whole] of Object.entries(cut_by_axis(job)[axis]))
        if (whole % size) return no(axis, `${axis} ${size} does not divide ${name} ${whole}; it must`);
      if (axis === "context" && size > 1 && job.context % (2 * size))
        return no(axis, `context ${size}: its double does not divide context length ${job.context}; `
          + "it must, since each device has an early and a late part of a causal sequence");
      if (axis === "context" && size > 1 && job.attention === "eager")
        return no(axis, `context ${size} with eager attention; allowed is 1, since a ring of keys `
          + "needs flash");
    }
    const own = Math.floor(job.batch / layout.data);
    if (own % layout.microbatches)
      return no("microbatches", `microbatches ${layout.microbatches} does not divide the ${own} `
        + `sequences of a data rank (batch ${job.batch} / data ${layout.data}); it must`);
    if (devices(layout) > job.devices)
      return no("devices", `data x tensor x pipeline x context is ${devices(layout)}; allowed are at `
        + `most the ${job.devices} devices`);
    return null;
  }

  // The fullest moment on the fullest device, and its bytes by component.
  function memory(job, layout) {
    const p = layout.pipeline;
    const ends = p > 1 ? [[true, false], [false, true]] : [[true, true]];
    const moments = ends.flatMap((end) => stage_memory(job, layout, ...end));
    return largest(moments, ([, held]) => memory_bytes(held));
  }

  // The first of the largest, as Python's max has it.
  function largest(values, key) {
    return values.reduce((best, one) => (key(one) > key(best) ? one : best));
  }

  function stage_memory(job, layout, first, last) {
    const { shape } = job, t = layout.tensor, n = shards(layout);
    const blocks = shape.num_layers / layout.pipeline;
    const weights = weights_of(job, layout, first, last);
    const fsdp = layout.sharding === "fsdp", bf16 = job.precision === "bf16";
    const table = (shape.vocab_size * shape.d_model) / t, block = block_weights(shape, t);
    const head = last ? table + shape.d_model : 0;
    const tokens = tokens_of(job, layout);
    const [whole, cut] = saved(job);
    const mask = job.attention === "eager" ? job.context ** 2 : 0;
    const kept_whole = tokens * (whole + cut / t) + mask, entry = tokens * WIDE * shape.d_model;
    const stays = layout.checkpointing === "none" ? kept_whole : entry;
    const held = first ? Math.min(layout.pipeline, layout.microbatches) : 1;
    const inner = Math.max(
      (3 * element(job) * shape.d_ff) / t, (SCORE_TENSORS * WIDE * scores(job)) / t);
    const temporary = kept_whole - stays + tokens * ((WIDE + element(job)) * shape.d_model + inner);
    const top = last ? tokens * (2 * WIDE + (bf16 ? NARROW : 0)) * shape.d_model : 0;
    const logits = last ? ((tokens * shape.vocab_size) / t) * LOGIT_TENSORS * WIDE : 0;
    const parameters =
      (WIDE * weights) / (fsdp || (layout.sharding === "zero1" && bf16) ? n : 1);
    const optimizer = (OPTIMIZERS[job.optimizer] * weights) / (layout.sharding === "none" ? 1 : n);

    function at(gone, gradients, kept, temporaries) {
      let working = NARROW * (weights - first * table - gone);
      if (fsdp) working = element(job) * 3 * Math.max(block, first || last ? table : 0);
      else if (!bf16) working = 0;
      else if (layout.sharding === "zero1") working = NARROW * weights;
      return {
        parameters,
        gradients: (WIDE * gradients) / (fsdp ? n : 1),
        optimizer,
        "working weights": working,
        activations: kept,
        temporaries: temporaries + job.device.workspace,
      };
    }

    const everything = held * blocks * stays + top;
    const before = head + (blocks - 1) * block;
    if (layout.microbatches > 1)
      return [["accumulating", at(0, weights, everything, Math.max(temporary, logits))]];
    return [
      ["loss", at(0, 0, everything, logits)],
      ["first block's backward", at(head, head, everything - top, temporary)],
      ["last block's backward", at(before, before, stays, temporary)],
      ["after the backward", at(weights - first * table, weights, 0, 0)],
    ];
  }

  const block_weights = (shape, t) =>
    (4 * shape.d_model ** 2 + 3 * shape.d_model * shape.d_ff) / t + 2 * shape.d_model;

  function weights_of(job, layout, first, last) {
    const { shape } = job, t = layout.tensor;
    const table = (shape.vocab_size * shape.d_model) / t;
    const blocks = (shape.num_layers / layout.pipeline) * block_weights(shape, t);
    return blocks + first * table + last * (table + shape.d_model);
  }

  const tokens_of = (job, layout) =>
    Math.floor(Math.floor(job.batch / layout.data) / layout.microbatches)
    * Math.floor(job.context / layout.context);

  // What is allowed, whether or not it fits; a layout that breaks a rule has no plan.
  function evaluate(job, layout) {
    const [moment, held] = memory(job, layout);
    return { memory: held, moment, ...timed(job, layout) };
  }

  function timed(job, layout) {
    const m = layout.microbatches, p = layout.pipeline;
    const ends = p === 1 ? [[true, true, 1]]
      : [[true, false, 1], [false, false, p - 2], [false, true, 1]].filter(([, , count]) => count);
    const stages = ends.map(([first, last]) => stage(job, layout, first, last));
    const counts = ends.map(([, , count]) => count);
    const weights = Math.max(
      weights_of(job, layout, true, p === 1), weights_of(job, layout, p === 1, true));
    const [once_links, once_network] = once(job, layout, weights);
    const updated = weights / (layout.sharding === "none" ? 1 : shards(layout));
    const update = (update_bytes(job) * updated) / job.device.memory_bandwidth;

    function pipelined(seconds) {
      const slowest = Math.max(...seconds);
      const through = sum(seconds.map((s, i) => s * counts[i]));
      return [m * slowest, through - slowest];
    }
    const together = (links) => (job.device.torus ? Math.max(...links) : sum(links));
    const least = (one) => Math.max(one.compute, one.memory, together(one.links), one.network);
    function in_all(one) {
      const [tensor, data, pipeline] = one.links.map((seconds) => m * seconds);
      return together([tensor, data + once_links, pipeline]);
    }

    const [work, wait] = pipelined(stages.map(least));
    const links = Math.max(...stages.map(in_all));
    const network = m * Math.max(...stages.map((one) => one.network)) + once_network;
    const step_s = Math.max(work + wait, links, network) + update;
    const alone = stages.map(
      (one) => Math.max(one.compute, one.memory) + sum(one.links) + one.network);
    const serial_s = sum(pipelined(alone)) + once_links + once_network + update;
    const busy = {
      computation: m * Math.max(...stages.map((one) => one.compute)),
      "memory bandwidth": m * Math.max(...stages.map((one) => one.memory)) + update,
      "node links": links,
      network,
      "pipeline bubble": wait,
    };
    const bound = largest(Object.keys(busy), (name) => busy[name]);
    return { step_s, serial_s, busy, bound };
  }

  function flops_share(job, layout, seconds) {
    const { shape } = job, tokens = job.batch * job.context;
    const forward = shape.num_layers * 4 * product(tokens, shape.d_model, shape.d_model)
      + shape.num_layers * attention_flops(job, tokens, true)
      + shape.num_layers * 3 * product(tokens, shape.d_ff, shape.d_model)
      + product(tokens, shape.vocab_size, shape.d_model);
    return (3 * forward) / (devices(layout) * peak(job) * seconds);
  }

  const tokens_per_s = (job, seconds) => (job.batch * job.context) / seconds;
  const product = (m, n, k) => 2 * m * n * k;
  const attention_flops = (job, tokens, causal) =>
    job.shape.num_heads * tokens * job.context * head_dim(job.shape) * (causal ? 1 : 2) * 2;

  function stage(job, layout, first, last) {
    const { shape } = job, t = layout.tensor;
    const blocks = Math.floor(shape.num_layers / layout.pipeline);
    const tokens = tokens_of(job, layout);
    const again = layout.checkpointing === "block" ? 1 : 0;
    let flops = blocks * block_flops(job, tokens, again);
    if (last) flops += 3 * product(tokens, shape.vocab_size, shape.d_model);
    const weights = weights_of(job, layout, first, last) * element(job);
    let moved = (3 + again) * weights;
    const [forward, backward] = constants.score_bytes[job.precision];
    moved += ((blocks * tokens * scores(job)) / t) * ((1 + again) * forward + backward);
    const d = shape.d_model;
    const message = element(job) * tokens * d;
    const sums = blocks * (again ? 5 : 4) + first + last;
    const tensor = scaled(2 * sums, ring(job, layout, "tensor", message));
    let data = [0, 0];
    if (layout.sharding === "fsdp") data = scaled(3, ring(job, layout, "data", weights));
    const rounds = (layout.context - 1) * 2 * element(job) * tokens * (d / t);
    const context = sent(job, layout, "context", blocks * (again ? 4 : 3) * rounds);
    const hop = element(job) * tokens * d;
    const pipeline = sent(job, layout, "pipeline", hop * (!last + !first));
    return {
      compute: flops / t / rate(job),
      memory: moved / job.device.memory_bandwidth,
      links: [tensor[0], data[0] + context[0], pipeline[0]],
      network: tensor[1] + data[1] + context[1] + pipeline[1],
    };
  }

  function block_flops(job, tokens, again) {
    const { shape } = job, flash = job.attention === "flash";
    const square = product(tokens, shape.d_model, shape.d_model);
    const wide = product(tokens, shape.d_ff, shape.d_model);
    const scores = attention_flops(job, tokens, flash);
    const forward = 4 * square + 3 * wide + scores;
    const both = 3 * (4 * square + 3 * wide) + (flash ? 3.5 : 3) * scores;
    return both + (again ? forward - wide : 0);
  }

  function once(job, layout, weights) {
    if (layout.sharding === "fsdp") return [0, 0];
    return scaled(2, ring(job, layout, "data", element(job) * weights));
  }

  function inside(job, layout, axis) {
    const { tensor: t, context: c, data: d } = layout;
    const [before, n] = { tensor: [1, t], context: [t, c], data: [t, c * d],
      pipeline: [t * c * d, layout.pipeline] }[axis];
    const node = job.device.node;
    if (devices(layout) <= node) return [n, n];
    return [n, node % before === 0 ? gcd(n, node / before) : 1];
  }
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);

  const all_gather_s = (size, n, bandwidth) => ((n - 1) * size) / (n * bandwidth);

  function ring(job, layout, axis, size) {
    const [n, k] = inside(job, layout, axis);
    return [all_gather_s(size, k, job.device.link),
      all_gather_s(size / k, Math.floor(n / k), job.device.network)];
  }

  function sent(job, layout, axis, size) {
    const [n, k] = inside(job, layout, axis);
    if (n === 1) return [0, 0];
    return k === n ? [size / job.device.link, 0] : [0, size / job.device.network];
  }
  const scaled = (times, seconds) => seconds.map((one) => times * one);

  function largest_batch(job, layout) {
    const unit = layout.data * layout.microbatches;
    const fits = (k) =>
      memory_bytes(memory({ ...job, batch: k * unit }, layout)[1]) <= allowed(job);
    let low = 0, high = 1;
    while (fits(high)) [low, high] = [high, 2 * high];
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      [low, high] = fits(middle) ? [middle, high] : [low, middle];
    }
    return low * unit;
  }

  return {
    problem, evaluate, memory, memory_bytes, allowed, largest_batch, flops_share, tokens_per_s,
    parameter_count, devices, saved,
  };
};
