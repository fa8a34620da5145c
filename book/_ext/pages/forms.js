// What the forms of the book share: numbers read and written, rules said in place, the state in the
// page's address. Their HTML comes from report/pages/forms.py.
globalThis.a2Forms = (() => {
  // The rule that a text breaks as a number, or "". Groups of three digits may have commas.
  function problem(text, whole, least, most) {
    const value = parsed(text);
    if (value >= least && value <= most && (!whole || Number.isInteger(value))) return "";
    return `allowed: ${whole ? "whole " : ""}numbers from ${least} to ${grouped(most)}`;
  }
  function parsed(text) {
    const digits = text.trim();
    if (/^\d{1,3}(,\d{3})+$/.test(digits)) return Number(digits.replaceAll(",", ""));
    return /^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(digits) ? Number(digits) : NaN;
  }

  const grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
  // To three significant figures; an exponent where zeros would be counted.
  function shown(value) {
    if (value === 0) return "0";
    const size = Math.floor(Math.log10(Math.abs(value)));
    if (size < -4 || size > 8) return value.toExponential(2).replace("e+", "e");
    const text = value.toFixed(Math.max(0, 2 - size));
    return text.includes(".") ? text : grouped(text);
  }

  // The state of a form as the part of an address behind "#": its name, then what each field holds.
  const address = (name, fields) =>
    `#${name}&${new URLSearchParams(fields.map((field) => [field.name, field.value]))}`;
  // What an address says of the fields of the form of that name, or null.
  function stateOf(hash, name) {
    if (hash.split("&")[0] !== `#${name}`) return null;
    return Object.fromEntries(new URLSearchParams(hash.slice(name.length + 2)));
  }

  // `respond` is called with each field's value, by name, when every number is one that is allowed,
  // and with the names of the fields that the reader set, the last one first.
  // It returns { wrong: { field: rule } } for what cannot be together, or { out, drawings, said,
  // verdict }: texts by the name of their cell, SVG by the class of its picture, all of it in words,
  // and the gist of that.
  function start(root, respond) {
    const form = root.querySelector("form");
    const fields = [...form.querySelectorAll("input, select:not([data-sets])")];
    const sets = [...form.querySelectorAll("select[data-sets]")];  // each sets several fields
    const cells = [...root.querySelectorAll("[data-out]")];
    const pictures = [...root.querySelectorAll("svg[data-draw]")];
    const said = root.querySelector(".a2-state");
    const verdict = root.querySelector(".a2-verdict");
    const recent = [];
    let later;

    function rules() {
      const wrong = {};
      for (const field of fields) {
        if (field.tagName === "SELECT") continue;
        const { whole, least, most } = field.dataset;
        const rule = problem(field.value, whole === "1", Number(least), Number(most));
        if (rule) wrong[field.name] = rule;
      }
      return wrong;
    }
    const value = (field) => field.tagName === "SELECT" ? field.value
      : parsed(field.value) * Number(field.dataset.scale);

    function update() {
      let wrong = rules(), answer = { out: {}, drawings: {} };
      if (!Object.keys(wrong).length) {
        answer = respond(
          Object.fromEntries(fields.map((field) => [field.name, value(field)])), recent);
        wrong = answer.wrong ?? {};
      }
      const bad = Object.keys(wrong).length > 0;
      for (const field of fields) {
        const rule = wrong[field.name] ?? "", line = document.getElementById(`${field.id}-error`);
        if (line.textContent !== rule) line.textContent = rule;
        field.setAttribute("aria-invalid", String(rule !== ""));
        if (rule) field.closest("details")?.setAttribute("open", "");
      }
      for (const cell of cells) cell.textContent = bad ? "–" : answer.out[cell.dataset.out] ?? "–";
      for (const picture of pictures)
        picture.innerHTML = bad ? "" : answer.drawings[picture.dataset.draw];
      root.classList.toggle("a2-wrong", bad);
      for (const select of sets) {
        const made = Object.entries(JSON.parse(select.dataset.sets)).find(([, numbers]) =>
          Object.entries(numbers).every(([name, n]) => parsed(form.elements[name].value) === n));
        select.value = made ? made[0] : "";
      }
      const none = "No answer until what is marked is allowed.";
      if (verdict) verdict.textContent = bad ? none : answer.verdict;
      return bad ? none : answer.said;
    }

    const write = () => history.replaceState(null, "", address(root.id, fields));
    // Said and written into the address once, not at each digit.
    function changed() {
      const text = update();
      clearTimeout(later);
      later = setTimeout(() => {
        said.textContent = text;
        write();
      }, 400);
    }
    async function copy() {
      const told = root.querySelector(".a2-copied");
      write();
      try {
        await navigator.clipboard.writeText(location.href);
        told.textContent = "copied";
      } catch {
        told.textContent = "the browser allows no copy; the address above the page is the link";
      }
      setTimeout(() => { told.textContent = ""; }, 5000);
    }
    function restore() {
      const state = stateOf(location.hash, root.id);
      if (!state) return false;
      form.reset();
      recent.length = 0;
      for (const field of fields) {
        const text = state[field.name];
        if (text === undefined) continue;
        if (field.tagName === "INPUT" || [...field.options].some((one) => one.value === text))
          field.value = text;
      }
      return true;
    }
    function show() {
      const found = restore();
      said.textContent = update();
      // Formulas above the form take their height late.
      if (found) (window.MathJax?.startup?.promise ?? Promise.resolve())
        .then(() => root.scrollIntoView());
    }
    form.addEventListener("input", (event) => {
      const { name } = event.target;
      recent.splice(0, recent.length, name, ...recent.filter((other) => other !== name));
      const numbers = event.target.dataset.sets
        && JSON.parse(event.target.dataset.sets)[event.target.value];
      if (numbers)
        for (const [name, n] of Object.entries(numbers)) form.elements[name].value = n;
      changed();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    root.querySelector(".a2-copy").addEventListener("click", copy);
    addEventListener("hashchange", () => stateOf(location.hash, root.id) && show());
    root.hidden = false;
    show();
  }

  return { problem, grouped, shown, address, stateOf, start };
})();
