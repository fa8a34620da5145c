// The formulas of src/a2lib/theory/parallelism.py for a page, of plain numbers. Names, arguments and
// order of arithmetic are those of the Python twin, and so is every result: the tests compare both.
// A layer is { tokens, d_model, d_ff, flops, bandwidth, element_bytes }.
globalThis.a2Parallelism = (() => {
  const FORWARD_PRODUCTS = 3, BACKWARD_PRODUCTS = 6, MATRICES = 3;

  const all_gather_s = (size, n, bandwidth) => ((n - 1) * size) / (n * bandwidth);
  const all_reduce_s = (size, n, bandwidth) => 2 * all_gather_s(size, n, bandwidth);

  const product_flops = (layer) => 2 * layer.tokens * layer.d_model * layer.d_ff;
  const weight_bytes = (layer) => MATRICES * layer.element_bytes * layer.d_model * layer.d_ff;
  const activation_bytes = (layer) => layer.element_bytes * layer.tokens * layer.d_model;

  function cost(layer, products, n, data_s, tensor_s) {
    const flops = (products * product_flops(layer)) / n;
    return { flops, compute_s: flops / layer.flops, data_s, tensor_s };
  }

  function data_parallel(layer, n) {
    const sums = all_reduce_s(weight_bytes(layer), n, layer.bandwidth);
    return {
      forward: cost(layer, FORWARD_PRODUCTS, n, 0, 0),
      backward: cost(layer, BACKWARD_PRODUCTS, n, sums, 0),
    };
  }

  function fully_sharded_tensor_parallel(layer, n_fsdp, n_tp) {
    const gather = all_gather_s(weight_bytes(layer) / n_tp, n_fsdp, layer.bandwidth);
    const reduce = all_reduce_s(activation_bytes(layer) / n_fsdp, n_tp, layer.bandwidth);
    const n = n_fsdp * n_tp;
    return {
      forward: cost(layer, FORWARD_PRODUCTS, n, gather, reduce),
      backward: cost(layer, BACKWARD_PRODUCTS, n, gather + gather, reduce),
    };
  }

  const data_slope = (layer) =>
    (2 * layer.tokens * layer.bandwidth) / (layer.element_bytes * layer.flops);
  const tensor_slope = (layer) =>
    (3 * layer.d_ff * layer.bandwidth) / (layer.element_bytes * layer.flops);
  const data_limit = (layer) => 1 + data_slope(layer);
  const tensor_limit = (layer, pass) => 1 + tensor_slope(layer) * (pass === "backward" ? 2 : 1);
  const mesh_limit = (layer) => data_limit(layer) * tensor_limit(layer, "forward");

  function shared_mesh_split(layer) {
    const a = data_slope(layer), b = tensor_slope(layer);
    const budget = 1 + 1 / a + 1 / b;
    const n_fsdp = Math.min(Math.max((a * budget) / 2, 1), 1 + a);
    return [n_fsdp, b * (budget - n_fsdp / a)];
  }

  function shared_mesh_limit(layer) {
    const [n_fsdp, n_tp] = shared_mesh_split(layer);
    return n_fsdp * n_tp;
  }

  function best_split(layer, n, shared) {
    const a = data_slope(layer), b = tensor_slope(layer);
    const root = Math.sqrt((a - b) * (a - b) + 4 * a * b * n);
    let n_fsdp = a > b ? (2 * a * n) / (a - b + root) : (b - a + root) / (2 * b);
    if (shared) n_fsdp = Math.sqrt((n * a) / b);
    n_fsdp = Math.min(Math.max(n_fsdp, 1), n);
    return [n_fsdp, n / n_fsdp];
  }

  function divisors(n) {
    const low = [], high = [];
    for (let k = 1; k * k <= n; k++) {
      if (n % k) continue;
      low.push(k);
      if (k * k < n) high.unshift(n / k);
    }
    return [...low, ...high];
  }

  function best_whole_split(layer, n, shared) {
    let best = null, least = Infinity;
    for (const k of divisors(n)) {
      const share = communication_share(layer, k, n / k, shared, "forward");
      if (best === null || share < least) [best, least] = [[k, n / k], share];
    }
    return best;
  }

  // Of one pass's cost, as fully_sharded_tensor_parallel has it.
  function share_of({ compute_s, data_s, tensor_s }, shared) {
    return (shared ? data_s + tensor_s : Math.max(data_s, tensor_s)) / compute_s;
  }

  function communication_share(layer, n_fsdp, n_tp, shared, pass) {
    return share_of(fully_sharded_tensor_parallel(layer, n_fsdp, n_tp)[pass], shared);
  }

  // What a pass waits for: "computation", or the axes that take longer than it, alone or together.
  function binds(layer, n_fsdp, n_tp, shared, pass) {
    const one = fully_sharded_tensor_parallel(layer, n_fsdp, n_tp)[pass];
    if (share_of(one, shared) <= 1) return "computation";
    if (shared && one.data_s > 0 && one.tensor_s > 0) return "both axes";
    return one.data_s > one.tensor_s ? "FSDP" : "tensor parallelism";
  }

  return {
    data_parallel, fully_sharded_tensor_parallel, data_slope, tensor_slope, data_limit, tensor_limit,
    mesh_limit, shared_mesh_split, shared_mesh_limit, best_split, best_whole_split,
    communication_share, binds,
  };
})();
