// The formulas of src/a2lib/theory/layouts.py, layout_time.py, stages.py, jobs.py and planner.py
// (largest_batch) for a page.
// Names, arguments and order of arithmetic are those of the Python twins, and so is every result:
// the tests compare both. Constants come from Python: report/pages/calculator.py.
// A job is { shape, device, devices, batch, context, headroom, precision, attention, optimizer,
// efficiency, activations, frozen }, a layout { data, tensor, pipeline, context, microbatches, sharding,
// checkpointing, chunks, sequence, expert, schedule }; what is missing has the value of a plain plan.
globalThis.a2Layouts = (constants) => {
  const { WIDE, NARROW, LOGIT_TENSORS, SCORE_TENSORS, OPTIMIZERS } = constants;
  const AXES = ["data", "tensor", "pipeline", "context"];

  const of = (shape, name) => shape[name] ?? 0;
  const head_dim = (shape) =>
    (of(shape, "head_size") || shape.d_model / shape.num_heads) + Math.floor(of(shape, "rope") / 2);
  const kv_heads = (shape) => shape.num_kv_heads ?? shape.num_heads;
  const q_width = (shape) => shape.num_heads * head_dim(shape);
  const kv_width = (shape) => kv_heads(shape) * head_dim(shape);
  function attention_matrices(shape) {
    const { d_model: d, num_heads: h } = shape, [q, kv, r] = ["q_rank", "kv_rank", "rope"].map(
      (name) => of(shape, name));
    if (!kv) return d * (2 * q_width(shape) + 2 * kv_width(shape));
    const n = head_dim(shape) - Math.floor(r / 2), turned = n + r;
    const queries = q ? q * (d + h * turned) : d * h * turned;
    return queries + d * (kv + r) + kv * h * 2 * n + h * n * d;
  }
  const block_matrices = (shape) => attention_matrices(shape) + 3 * shape.d_model * shape.d_ff;
  const block_vectors = (shape) =>
    2 * shape.d_model + of(shape, "q_rank") + of(shape, "kv_rank");
  const trained = (job) => 1 - (job.frozen ?? 0);
  const experts = (shape) => of(shape, "experts"), dense = (shape) => of(shape, "dense");
  const expert_matrices = (shape) => experts(shape)
    ? (3 * shape.d_model * shape.d_ff) / (shape.top_k + shape.shared) : 0;
  const router = (shape) => shape.d_model * experts(shape);
  function more_of_experts(shape, n = 1) {
    const each = expert_matrices(shape);
    return (experts(shape) * each) / n - of(shape, "top_k") * each + router(shape) + experts(shape);
  }
  const allowed = (job) => (1 - job.headroom) * job.device.memory;
  const peak = (job) => (job.precision === "bf16" ? job.device.flops : job.device.fp32);
  const rate = (job) => job.efficiency * peak(job);
  const element = (job) => (job.precision === "bf16" ? NARROW : WIDE);
  const fused = (job) => job.activations === "fused";
  const residual = (job) => (fused(job) ? element(job) : WIDE);
  const chunks = (layout) => layout.chunks ?? 1;
  const schedule = (layout) => layout.schedule ?? "1f1b", cut_experts = (layout) => layout.expert ?? 1;
  const rows = (layout) => (layout.sequence === false ? 1 : layout.tensor);
  const update_bytes = (job) => 3 * WIDE + 2 * OPTIMIZERS[job.optimizer];
  const scores = (job) => (job.attention === "eager" ? job.shape.num_heads * job.context : 0);
  const devices = (layout) => layout.data * layout.tensor * layout.pipeline * layout.context;
  const shards = (job, layout) => inside(job, layout, "data")[layout.sharding === "hsdp" ? 1 : 0];
  const sum = (values) => values.reduce((total, one) => total + one, 0);
  const memory_bytes = (held) => sum(Object.values(held));

  // saved.py by its coefficients: bytes that a token leaves whole on, and cut over, tensor's devices,
  // and of scores.
  function saved(job) {
    const { shape } = job, e = element(job), more = e * (of(shape, "top_k") * shape.d_model
      + 2 * (of(shape, "q_rank") + of(shape, "kv_rank")));
    if (fused(job)) {
      const sums = scores(job) ? 0 : WIDE * shape.num_heads;
      const heads = e * (2 * q_width(shape) + 2 * kv_width(shape));
      const whole = 4 * e * shape.d_model + 2 * WIDE;
      return [whole + more, heads + sums + 3 * e * shape.d_ff, e * scores(job)];
    }
    const { whole, cut } = constants.saved[job.attention][job.precision];
    const { d_model, d_ff, num_heads } = shape;
    const shared = 2 * e * (2 * d_model - q_width(shape) - kv_width(shape));
    return [
      whole.d_model * d_model + whole.one + more,
      cut.d_model * d_model + cut.d_ff * d_ff + cut.num_heads * num_heads - shared,
      cut.scores * num_heads * job.context,
    ];
  }

  function parameter_count(shape) {
    const { d_model, num_layers, vocab_size } = shape;
    return num_layers * (block_matrices(shape) + block_vectors(shape))
      + (num_layers - dense(shape)) * more_of_experts(shape)
      + tables(shape, { first: true, last: true }) * vocab_size * d_model + d_model;
  }

  function cut_by_axis(job) {
    const { num_heads, d_ff, vocab_size } = job.shape;
    return {
      data: { batch: job.batch },
      tensor: { num_heads, num_kv_heads: kv_heads(job.shape), d_ff, vocab_size },
      pipeline: {},
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
    if (shape.num_heads % kv_heads(shape))
      return no("num_kv_heads", `num_kv_heads ${kv_heads(shape)} does not divide num_heads `
        + `${shape.num_heads}; it must`);
    const [top_k, shared] = [of(shape, "top_k"), of(shape, "shared")];
    if (experts(shape) && (!top_k || shape.d_ff % (top_k + shared)))
      return no("experts", `d_ff ${shape.d_ff} of ${top_k} + ${shared} experts; it must be a whole `
        + "multiple of top_k + shared, with top_k from 1");
    if (top_k > experts(shape) || dense(shape) >= shape.num_layers)
      return no("experts", `top_k ${top_k} of ${experts(shape)} experts, dense ${dense(shape)} of `
        + `${shape.num_layers} layers; allowed are at most the experts, and fewer than the layers`);
    if (job.precision === "fp32" && device.fp32 === null)
      return no("precision", `precision fp32: allowed is bf16 on ${device.slug}, whose maker states `
        + "no rate in fp32");
    for (const axis of AXES) {
      const size = layout[axis];
      for (const [name, whole] of Object.entries(cut_by_axis(job)[axis]))
        if (whole % size) return no(axis, `${axis} ${size} does not divide ${name} ${whole}; it must`);
      const layers = shape.num_layers;
      if (axis === "pipeline" && !stage_blocks(layers, size))
        return no(axis, `pipeline ${size} does not divide num_layers ${layers}, nor up to three more, `
          + `in ${layers} stages or fewer; it must, the first having one fewer, the last up to two`);
      if (axis === "pipeline" && size > 1 && stage_blocks(layers, size)[0] < dense(shape))
        return no(axis, `pipeline ${size}: the first stage has fewer blocks than the ${dense(shape)} `
          + "dense; it must have all of them");
      if (axis === "tensor" && size > 1 && experts(shape))
        return no(axis, `tensor ${size} with experts; allowed is 1, since expert cuts them`);
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
    if (chunks(layout) > 1) {
      const [v, p, m] = [chunks(layout), layout.pipeline, layout.microbatches];
      if (p === 1) return no("chunks", `chunks ${v} with pipeline 1; allowed is 1`);
      const blocks = stage_blocks(shape.num_layers, p)[1];
      if (blocks % v)
        return no("chunks", `chunks ${v} does not divide the ${blocks} blocks of a stage; it must`);
      if (m % p)
        return no("chunks", `microbatches ${m} with chunks ${v}; allowed are multiples of the ${p} `
          + "stages");
    }
    if (schedule(layout) !== "1f1b") {
      const [v, p, m] = [chunks(layout), layout.pipeline, layout.microbatches];
      const least = schedule(layout) === "zb-h1" ? p : 2 * p - 1;
      if (p === 1 || v > 1 || m < least)
        return no("schedule", `schedule ${schedule(layout)} with pipeline ${p}, chunks ${v}, `
          + `microbatches ${m}; allowed are 2 stages or more, in one piece, and from ${least} `
          + "micro-batches on");
    }
    const n = cut_experts(layout);
    if (n > 1) {
      const wholes = { experts: experts(shape), "data x context": layout.data * layout.context };
      for (const [name, whole] of Object.entries(wholes))
        if (whole % n || !whole)
          return no("expert", `expert ${n} does not divide ${name} ${whole}; it must`);
      if (layout.sharding === "hsdp")
        return no("expert", `expert ${n} with sharding hsdp; allowed is 1, since nodes hold the same `
          + "then");
    }
    if (layout.checkpointing === "selective" && job.attention === "flash")
      return no("checkpointing", "checkpointing selective with flash attention; allowed are none and "
        + "block, since flash keeps no scores");
    if (devices(layout) > job.devices)
      return no("devices", `data x tensor x pipeline x context is ${devices(layout)}; allowed are at `
        + `most the ${job.devices} devices`);
    return null;
  }

  function stage_blocks(layers, stages) {
    const most = Math.ceil(layers / stages), lack = most * stages - layers;
    const found = [most - Math.floor(lack / 2), most, most - Math.ceil(lack / 2)];
    return stages > layers || lack > Math.min(3, stages - 1) || found[2] < 1 ? null : found;
  }

  function stages(job, layout) {
    const p = layout.pipeline, v = chunks(layout);
    if (p === 1)
      return [{ first: true, last: true, blocks: job.shape.num_layers, count: 1, held: 1,
        dense: dense(job.shape) }];
    const [first, middle, last] = stage_blocks(job.shape.num_layers, p);
    const kinds = { "1f1b": (i) => p - i, "zb-h1": () => p, "zb-h2": () => 2 * p - 1 };
    const one = v === 1 ? kinds[schedule(layout)] : (i) => p + (p - 1 - 2 * i) / v;
    const held = (i) => Math.min(one(i), layout.microbatches);
    return [
      { first: true, last: false, blocks: first, count: 1, held: held(0), dense: dense(job.shape) },
      { first: false, last: false, blocks: middle, count: p - 2, held: held(1), dense: 0 },
      { first: false, last: true, blocks: last, count: 1, held: held(p - 1), dense: 0 },
    ].filter((one) => one.count);
  }

  // The fullest moment on the fullest device, and its bytes by component.
  function memory(job, layout) {
    const every = stages(job, layout);
    if (every.length === 3 && every[1].blocks === every[0].blocks) every.splice(1, 1);
    const moments = every.flatMap((one) => stage_memory(job, layout, one));
    return largest(moments, ([, held]) => memory_bytes(held));
  }

  // The first of the largest, as Python's max has it.
  function largest(values, key) {
    return values.reduce((best, one) => (key(one) > key(best) ? one : best));
  }

  function stage_memory(job, layout, one) {
    const { shape } = job, t = layout.tensor, r = rows(layout), n = shards(job, layout);
    const { first, last, blocks } = one, e = element(job), { sharding } = layout;
    const weights = weights_of(job, layout, one), stream = residual(job) * shape.d_model;
    const fsdp = sharding === "fsdp" || sharding === "hsdp", bf16 = job.precision === "bf16";
    const share = (cut_experts(layout) === 1 ? 1 : weights_of(job, layout, one, 1) / weights) / n;
    const table = (shape.vocab_size * shape.d_model) / t, block = block_weights(shape, t);
    const whole_block = blocks > one.dense
      ? block + more_of_experts(shape, cut_experts(layout)) : block;
    const most = Math.max(whole_block, first || last ? table : 0);
    const head = last ? table + shape.d_model : 0;
    const bare = first && !(last && shape.tied) ? table : 0;
    const tokens = tokens_of(job, layout);
    const [whole, cut, of_scores] = saved(job);
    const mask = job.attention === "eager" ? job.context ** 2 : 0;
    const without = tokens * (whole / r + cut / t);
    const kept_whole = without + (tokens * of_scores) / t + mask;
    const stays = { none: kept_whole, selective: without,
      block: (tokens * stream) / r }[layout.checkpointing];
    const gathered = r > 1 ? 2 * e * shape.d_model : 0;
    const inner = Math.max((3 * e * shape.d_ff) / t, (SCORE_TENSORS * WIDE * scores(job)) / t);
    const gradient = (stream + e * shape.d_model) / r;
    const temporary = kept_whole - stays + tokens * (gradient + gathered + inner);
    const copy = bf16 && residual(job) === WIDE ? NARROW : 0;
    const top = last ? (tokens * (2 * stream + copy * shape.d_model)) / r : 0;
    const logits = last
      ? tokens * ((shape.vocab_size / t) * LOGIT_TENSORS * WIDE + gathered / 2) : 0;
    const parameters = WIDE * weights * (fsdp || (sharding !== "none" && bf16) ? share : 1);
    const optimizer = OPTIMIZERS[job.optimizer] * trained(job) * weights
      * (sharding === "none" ? 1 : share);

    function at(gone, gradients, kept, temporaries) {
      let working = NARROW * (weights - bare - gone);
      if (fsdp) working = e * (2 + trained(job)) * most;
      else if (!bf16) working = 0;
      else if (sharding !== "none") working = NARROW * weights;
      if (sharding === "zero2") working += e * trained(job) * most;
      return {
        parameters,
        gradients: WIDE * trained(job) * gradients * (fsdp || sharding === "zero2" ? share : 1),
        optimizer,
        "working weights": working,
        activations: kept,
        temporaries: temporaries + job.device.workspace,
      };
    }

    const everything = one.held * blocks * stays + top;
    const before = weights - bare - (one.dense ? block : whole_block);
    if (layout.microbatches > 1)
      return [["accumulating", at(0, weights, everything, Math.max(temporary, logits))]];
    return [
      ["loss", at(0, 0, everything, logits)],
      ["first block's backward", at(head, head, everything - top, temporary)],
      ["last block's backward", at(before, before, stays, temporary)],
      ["after the backward", at(weights - bare, weights, 0, 0)],
    ];
  }

  const block_weights = (shape, t) =>
    block_matrices(shape) / t + block_vectors(shape);
  const tables = (shape, { first, last }) => first + last - (shape.tied && first && last ? 1 : 0);

  function weights_of(job, layout, one, expert = cut_experts(layout)) {
    const { shape } = job, t = layout.tensor;
    const table = (shape.vocab_size * shape.d_model) / t;
    let blocks = one.blocks * block_weights(shape, t);
    if (experts(shape)) blocks += (one.blocks - one.dense) * more_of_experts(shape, expert);
    return blocks + tables(shape, one) * table + one.last * shape.d_model;
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
    const m = layout.microbatches, every = stages(job, layout);
    const asked = every.map((one) => stage(job, layout, one));
    const fullest = largest(every, (one) => weights_of(job, layout, one));
    const [once_links, once_network] = once(job, layout, fullest);
    const updated = layout.sharding === "none" ? weights_of(job, layout, fullest)
      : weights_of(job, layout, fullest, 1) / shards(job, layout);
    const waits = waiting(job, layout);
    const update = (update_bytes(job) * trained(job) * updated) / job.device.memory_bandwidth;

    function pipelined(seconds) {
      const slowest = Math.max(...seconds);
      const through = sum(seconds.map((s, i) => s * every[i].count));
      return [m * slowest, (through - slowest) * waits];
    }
    const together = (links) => (job.device.torus ? Math.max(...links) : sum(links));
    const least = (one) => Math.max(one.compute, one.memory, together(one.links), one.network);
    const likely = (one) => Math.max(least(one), Math.max(one.compute, one.memory) + one.waited);
    function in_all(one) {
      const [tensor, data, pipeline] = one.links.map((seconds) => m * seconds);
      return together([tensor, data + once_links, pipeline]);
    }

    const [work, wait] = pipelined(asked.map(least));
    const links = Math.max(...asked.map(in_all));
    const network = m * Math.max(...asked.map((one) => one.network)) + once_network;
    const step_s = Math.max(work + wait, links, network) + update;
    const expected_s = Math.max(sum(pipelined(asked.map(likely))), links, network) + update;
    const alone = asked.map(
      (one) => Math.max(one.compute, one.memory) + sum(one.links) + one.network);
    const serial_s = sum(pipelined(alone)) + once_links + once_network + update;
    const busy = {
      computation: m * Math.max(...asked.map((one) => one.compute)),
      "memory bandwidth": m * Math.max(...asked.map((one) => one.memory)) + update,
      "node links": links,
      network,
      "pipeline bubble": wait,
    };
    const bound = largest(Object.keys(busy), (name) => busy[name]);
    return { step_s, expected_s, serial_s, busy, bound };
  }

  function flops_share(job, layout, seconds) {
    const { shape } = job, tokens = job.batch * job.context;
    const forward = shape.num_layers * 2 * tokens * block_matrices(shape)
      + (shape.num_layers - dense(shape)) * 2 * tokens * router(shape)
      + shape.num_layers * attention_flops(job, tokens, true)
      + product(tokens, shape.vocab_size, shape.d_model);
    const scores = shape.num_layers * attention_flops(job, tokens, true);
    return (3 * forward - (1 - trained(job)) * (forward - scores)) / (devices(layout) * peak(job) * seconds);
  }

  const tokens_per_s = (job, seconds) => (job.batch * job.context) / seconds;
  const product = (m, n, k) => 2 * m * n * k;
  const attention_flops = (job, tokens, causal) =>
    job.shape.num_heads * tokens * job.context * head_dim(job.shape) * (causal ? 1 : 2) * 2;

  function stage(job, layout, one) {
    const { shape } = job, t = layout.tensor, { first, last, blocks } = one;
    const tokens = tokens_of(job, layout);
    const again = layout.checkpointing === "block" ? 1 : 0;
    let flops = blocks * block_flops(job, tokens, layout.checkpointing);
    const mixtures = experts(shape) ? blocks - one.dense : 0;
    const passes = 2 + trained(job);
    flops += mixtures * (passes + again) * 2 * tokens * router(shape);
    if (last) flops += passes * product(tokens, shape.vocab_size, shape.d_model);
    const weights = weights_of(job, layout, one) * element(job);
    let moved = (passes + again) * weights;
    const [forward, backward] = constants.score_bytes[job.precision];
    const runs = layout.checkpointing === "none" ? 1 : 2;
    moved += ((blocks * tokens * scores(job)) / t) * (runs * forward + backward);
    const d = shape.d_model;
    const message = element(job) * tokens * d;
    const gathers = rows(layout) > 1 ? blocks * (again ? 13 : 10) + 2 * first + 3 * last
      : 2 * (blocks * (again ? 5 : 4) + first + last);
    const tensor = scaled(gathers, ring(job, layout, "tensor", message));
    const routed = routed_s(job, layout, tokens, mixtures);
    let data = [0, 0];
    const often = { fsdp: 3, hsdp: 3, zero2: 1 }[layout.sharding];
    if (often) data = scaled(often - 1 + trained(job), replicated(job, layout, one, weights));
    if (layout.sharding === "hsdp") data = [data[0], 0];
    const rounds = (layout.context - 1) * 2 * element(job) * tokens * (kv_width(shape) / t);
    const context = sent(job, layout, "context", blocks * (again ? 4 : 3) * rounds);
    const hop = (element(job) * tokens * d) / rows(layout);
    const pipeline = sent(job, layout, "pipeline", hop * (2 * chunks(layout) - first - last));
    return {
      compute: flops / t / rate(job),
      memory: moved / job.device.memory_bandwidth,
      links: [tensor[0], data[0] + context[0] + routed[0], pipeline[0]],
      network: tensor[1] + data[1] + context[1] + routed[1] + pipeline[1],
      waited: sum(tensor) + sum(context) + sum(routed),
    };
  }

  function routed_s(job, layout, tokens, mixtures) {
    const [n, k] = inside(job, layout, "expert"), { shape } = job;
    if (n === 1 || !mixtures) return [0, 0];
    const messages = mixtures * (layout.checkpointing === "block" ? 5 : 4);
    const size = messages * element(job) * tokens * shape.d_model;
    const apart = Math.floor(n / k);
    const nodes = Math.min(shape.top_k, of(shape, "nodes") || shape.top_k, apart);
    return [all_gather_s(size * shape.top_k, k, job.device.link),
      all_gather_s(size * nodes, apart, job.device.network)];
  }

  function waiting(job, layout) {
    if (schedule(layout) === "1f1b") return 1 / chunks(layout);
    const weight = (2 * trained(job) * block_matrices(job.shape)) / block_flops(job, 1, layout.checkpointing);
    return 1 - (schedule(layout) === "zb-h1" ? 2 : 3) * weight;
  }

  function block_flops(job, tokens, checkpointing) {
    const { shape } = job, flash = job.attention === "flash";
    const products = 2 * tokens * block_matrices(shape);
    const wide = product(tokens, shape.d_ff, shape.d_model);
    const scores = attention_flops(job, tokens, flash);
    const again = { none: 0, selective: scores, block: products + scores - wide };
    return (2 + trained(job)) * products + (flash ? 3.5 : 3) * scores + again[checkpointing];
  }

  function once(job, layout, one) {
    if (layout.sharding === "fsdp") return [0, 0];
    const rings = (layout.sharding === "zero2" ? 1 : 2) * trained(job);
    const size = weights_of(job, layout, one) * element(job);
    const found = scaled(rings, replicated(job, layout, one, size));
    return layout.sharding === "hsdp" ? [0, found[1]] : found;
  }

  function replicated(job, layout, one, size) {
    const { shape } = job, mixtures = experts(shape) ? one.blocks - one.dense : 0;
    const own = (mixtures * experts(shape) * expert_matrices(shape)) / cut_experts(layout)
      * element(job);
    if (!own) return ring(job, layout, "data", size);
    const [common, replicas] = [ring(job, layout, "data", size - own),
      ring(job, layout, "replicas", own)];
    return common.map((s, i) => s + replicas[i]);
  }

  function inside(job, layout, axis) {
    const { tensor: t, context: c, data: d } = layout, e = cut_experts(layout);
    const [before, n] = { tensor: [1, t], context: [t, c], data: [t, c * d], expert: [t, e],
      replicas: [t * e, Math.floor((c * d) / e)], pipeline: [t * c * d, layout.pipeline] }[axis];
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
