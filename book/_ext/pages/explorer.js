// The form of report/pages/explorer.py: reads it, and writes the answers and the map.
globalThis.a2Explorer = (() => {
  const theory = globalThis.a2Parallelism, { grouped, shown } = globalThis.a2Forms;
  const WIDTH = 360, HEIGHT = 300, LEFT = 44, TOP = 8, RIGHT = 346, BOTTOM = 262;

  const pair = (split) =>
    split.map((n) => (Number.isInteger(n) && n < 1e9 ? grouped(n) : shown(n))).join(" × ");
  // The devices that fit: a limit's whole part, unless it is too long to read.
  const whole = (limit) => (limit < 1e9 ? grouped(Math.floor(limit)) : shown(limit));

  // Every answer, by the name that its cell has in the form.
  function answers(layer, n_fsdp, n_tp) {
    const out = { n: grouped(n_fsdp * n_tp) };
    const costs = theory.fully_sharded_tensor_parallel(layer, n_fsdp, n_tp);
    for (const [pass, cost] of Object.entries(costs)) {
      for (const name of ["compute_s", "data_s", "tensor_s"])
        out[`costs.${name}.${pass}`] = shown(1e3 * cost[name]);
      out[`costs.overlap.${pass}`] = theory.binds(layer, n_fsdp, n_tp, false, pass);
      out[`costs.shared.${pass}`] = theory.binds(layer, n_fsdp, n_tp, true, pass);
    }
    const limits = {
      data: [theory.data_limit(layer), 1],
      tensor_forward: [1, theory.tensor_limit(layer, "forward")],
      tensor_backward: [1, theory.tensor_limit(layer, "backward")],
      mesh: [theory.data_limit(layer), theory.tensor_limit(layer, "forward")],
      shared_mesh: theory.shared_mesh_split(layer),
    };
    for (const [name, split] of Object.entries(limits)) {
      out[`limits.${name}.n`] = whole(split[0] * split[1]);
      out[`limits.${name}.at`] = pair(split);
    }
    for (const shared of [false, true]) {
      const name = `splits.${shared ? "shared" : "overlap"}`;
      const found = theory.best_whole_split(layer, n_fsdp * n_tp, shared);
      out[`${name}.best`] = pair(theory.best_split(layer, n_fsdp * n_tp, shared));
      out[`${name}.whole`] = pair(found);
      out[`${name}.share`] = shown(theory.communication_share(layer, ...found, shared, "forward"));
    }
    return out;
  }

  // The map in words, for a reader who does not see it.
  function state(layer, n_fsdp, n_tp, out) {
    const devices = n_fsdp * n_tp === 1 ? "device" : "devices";
    const [apart, shared] = [out["costs.overlap.forward"], out["costs.shared.forward"]];
    const binding = apart === shared
      ? `the forward is bound by ${apart}, however the axes share the links`
      : `the forward is bound by ${apart} if the axes communicate at the same time, and by ${shared} if one after the other`;
    return `${pair([n_fsdp, n_tp])} = ${out.n} ${devices}: ${binding}. `
      + `Computation bounds at most ${out["limits.mesh.n"]} devices, or ${out["limits.shared_mesh.n"]}, `
      + `at ${out["limits.shared_mesh.at"]}, if the axes share.`;
  }

  // The map as the text of SVG elements. Both axes are logarithmic, from 1 to beyond every point;
  // at least a quarter of each lies beyond its limit.
  function map(layer, n_fsdp, n_tp) {
    const a = theory.data_slope(layer), b = theory.tensor_slope(layer);
    const reach = (limit, n) => Math.log2(Math.max(4 * limit, limit ** (4 / 3), 2 * n));
    const right = reach(1 + a, n_fsdp), top = reach(1 + b, n_tp);
    const x = (n) => LEFT + ((RIGHT - LEFT) * Math.log2(n)) / right;
    const y = (n) => BOTTOM - ((BOTTOM - TOP) * Math.log2(n)) / top;
    const at = (n, m) => `${x(n).toFixed(1)} ${y(m).toFixed(1)}`;
    const curve = [];
    for (let i = 0; i <= 60; i++) {
      const n = (1 + a) ** (i / 60);
      curve.push(at(n, Math.max(1 + b * (1 - (n - 1) / a), 1)));
    }
    const beyond = [];  // where both axes take equally long, from the corner outwards
    for (let i = 0; i <= 40; i++) {
      const n = (1 + a) * (2 ** right / (1 + a)) ** (i / 40), m = 1 + (b * (n - 1)) / a;
      if (m <= 2 ** top) beyond.push(at(n, m));
    }
    const words = (px, py, text, more = "") => `<text x="${px}" y="${py}" ${more}>${text}</text>`;
    const parts = [
      `<rect class="bound" x="${LEFT}" y="${TOP}" width="${RIGHT - LEFT}" height="${BOTTOM - TOP}"/>`,
      `<path class="half" d="M${at(1, 1)}L${at(1, 1 + b)}L${at(1 + a, 1 + b)}L${at(1 + a, 1)}z"/>`,
      `<path class="free" d="M${at(1, 1)}L${curve.join("L")}z"/>`,
      `<path class="edge" d="M${beyond.join("L")}"/>`,
    ];
    for (const [axis, last] of [["x", right], ["y", top]]) {
      const step = Math.ceil(last / 6);
      for (let power = 0; power <= last; power += step) {
        const tick = power < 14 ? String(2 ** power) : `2^${power}`;
        parts.push(axis === "x"
          ? words(x(2 ** power).toFixed(1), BOTTOM + 16, tick, 'text-anchor="middle"')
          : words(LEFT - 5, (y(2 ** power) + 4).toFixed(1), tick, 'text-anchor="end"'));
      }
    }
    parts.push(words((LEFT + RIGHT) / 2, HEIGHT - 5, "N_FSDP", 'text-anchor="middle"'));
    const middle = (TOP + BOTTOM) / 2;
    parts.push(words(13, middle, "N_TP", `text-anchor="middle" transform="rotate(-90 13 ${middle})"`));
    const n = Math.log2(n_fsdp * n_tp);  // from axis to axis, cut at the map's border
    const low = 2 ** Math.max(0, n - top), high = 2 ** Math.min(right, n);
    parts.push(`<path class="same" d="M${at(low, 2 ** n / low)}L${at(high, 2 ** n / high)}"/>`);
    const [f, t] = theory.shared_mesh_split(layer);
    parts.push(
      words(LEFT + 6, TOP + 16, "TP binds", 'class="on"'),
      words(RIGHT - 6, BOTTOM - 8, "FSDP binds", 'class="on" text-anchor="end"'),
      `<circle class="point" cx="${x(f).toFixed(1)}" cy="${y(t).toFixed(1)}" r="5"/>`,
      `<rect class="point" x="${(x(1 + a) - 5).toFixed(1)}" y="${(y(1 + b) - 5).toFixed(1)}" width="10" height="10"/>`,
      `<path class="mine" d="M${at(n_fsdp, n_tp)}m0-7l7 7l-7 7l-7-7z"/>`,
    );
    return parts.join("");
  }

  function respond({ n_fsdp, n_tp, ...layer }) {
    const out = answers(layer, n_fsdp, n_tp);
    return { out, drawings: { map: map(layer, n_fsdp, n_tp) },
      said: state(layer, n_fsdp, n_tp, out) };
  }
  document.querySelectorAll(".a2-explorer").forEach((root) => a2Forms.start(root, respond));

  return { answers, state, map };
})();
