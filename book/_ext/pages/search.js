// Search over A2_TEXTS (texts.js): [page, title, anchor, heading, text, number cells, weight, labels],
// the parts of a page in order. Any word of a query counts, stop words if there is no other, and what
// A2_WORDS (search.json) says means the same. Texts become text nodes, never HTML.
{
  // Words alone, with a blank around each: "all-reduce" as " all reduce ".
  const plain = (text) => ` ${text.normalize("NFKC").toLowerCase()
    .replace(/(?<![\p{L}\p{N}])\.|\.(?![\p{L}\p{N}])|[^\p{L}\p{N}.]+/gu, " ").trim()} `;
  const stem = (word) => word.length > 4 ? word.replace(/(ing|ed|es|s)$/, "") : word;
  const stop = new Set(A2_WORDS.stop.split(" "));
  const same = A2_WORDS.same.map((group) => group.map((one) => plain(one).trim()));
  const keys = Object.fromEntries(Object.entries(A2_WORDS.pages)
    .map(([page, phrases]) => [page, phrases.map((one) => plain(one).trim())]));
  const sections = A2_TEXTS.map(([page, title, anchor, heading, text, cells, weight, labels], i) => ({
    page, title, anchor, heading, text, weight, leads: A2_TEXTS[i - 1]?.[0] !== page,
    head: plain(heading), name: plain(`${title} ${labels ?? ""}`), body: plain(`${text} ${cells}`),
    keys: [plain(page.replace(/.*\//, "")).trim(), ...(keys[page] ?? [])],
  }));

  // What a query is about: for each of its phrases that has synonyms and each other word, what was
  // typed and what means the same.
  function subjects(query) {
    const words = plain(query).trim().split(" ").filter(Boolean), found = [];
    for (let at = 0; at < words.length;) {
      let length = Math.min(5, words.length - at), typed, groups;
      for (; length; length--) {
        typed = words.slice(at, at + length).join(" ");
        groups = same.filter((group) => group.includes(typed));
        if (groups.length) break;
      }
      if (!length) groups = [], typed = words[at];
      if (length || !stop.has(typed)) found.push({ words: typed, typed: length > 1 ? typed : stem(typed), like: groups.flat() });
      at += length || 1;
    }
    return found.length ? found : words.map((word) => ({ words: word, typed: word, like: [] }));
  }

  const starts = (phrase, where) => where.split(` ${phrase}`).length - 1;
  function points(section, { typed, like }) {
    let most = 0;
    for (const phrase of new Set([typed, ...like])) {
      let sum = 0;
      if (starts(phrase, section.head)) sum += 8;
      else if (section.head.includes(phrase)) sum += 3;
      if (starts(phrase, section.name)) sum += 4;
      const times = starts(phrase, section.body);
      if (times) sum += 2 + Math.min(times, 8) / 2;
      else if (section.body.includes(phrase)) sum += 0.5;
      most = Math.max(most, phrase === typed ? sum : 0.6 * sum);
    }
    const key = section.keys.some((one) => stem(one) === typed || one === typed || like.includes(one));
    return most + (key ? (section.leads ? 14 : 6) : 0);
  }
  // Every section that has a subject of the query, the best first; and the subjects that none has.
  function search(query) {
    const asked = subjects(query), all = plain(query).trim(), missing = [];
    const sum = new Map(), pages = new Map();  // points and subjects of a section, subjects of a page
    for (const subject of asked) {
      const having = sections.map((section) => [section, points(section, subject)]).filter((one) => one[1]);
      if (!having.length) missing.push(subject.words);
      const rare = 0.3 + Math.log(1 + sections.length / having.length) / Math.log(1 + sections.length);
      for (const [section, n] of having) {
        const [points, subjects] = sum.get(section) ?? [0, 0];
        sum.set(section, [points + n * rare, subjects + 1]);
        pages.set(section.page, (pages.get(section.page) ?? new Set()).add(subject));
      }
    }
    // What the page has elsewhere counts half.
    const covered = (section, subjects) => (subjects + pages.get(section.page).size) / 2 / asked.length;
    const ranked = [...sum].map(([section, [points, subjects]]) => {
      const phrase = asked.length > 1 && `${section.head}${section.body}`.includes(all) ? 15 : 0;
      return [section, (points + phrase) * covered(section, subjects) * section.weight];
    });
    return { asked, missing, found: ranked.sort((a, b) => b[1] - a[1]).map(([section]) => section) };
  }

  // Of the book's words the nearest to one that it has not, or null.
  let counts;
  function nearest(word) {
    if (!counts) {
      counts = new Map();
      for (const { head, body } of sections)
        for (const one of `${head}${body}`.match(/\p{L}{4,}/gu) ?? []) counts.set(one, (counts.get(one) ?? 0) + 1);
    }
    let best = null, least = word.length < 6 ? 1.9 : 2.9;
    for (const [one, times] of counts) {
      if (Math.abs(one.length - word.length) > 2) continue;
      const far = distance(one, word) - times / (1 + times);  // of equally near words the commonest
      if (far < least) [best, least] = [one, far];
    }
    return best;
  }
  function distance(one, other) {
    let row = [...Array(other.length + 1).keys()];
    for (let i = 1; i <= one.length; i++) {
      const next = [i];
      for (let j = 1; j <= other.length; j++)
        next.push(Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (one[i - 1] !== other[j - 1])));
      row = next;
    }
    return row.at(-1);
  }

  // Where a text has a subject, as [from, to]: at the start of a word, or else inside.
  function hits(text, asked) {
    const found = [];
    for (const phrase of new Set(asked.flatMap(({ typed, like }) => [typed, ...like]))) {
      const words = phrase.split(" ").map((word) => word.replace(/[.]/g, "\\.")).join("[^\\p{L}\\p{N}]+");
      const at = (pattern) => [...text.matchAll(new RegExp(pattern, "giu"))].map((m) => [m.index, m.index + m[0].length]);
      const start = at(`(?<![\\p{L}\\p{N}])${words}`);
      found.push(...(start.length || asked.every(({ typed }) => typed !== phrase) ? start : at(words)));
    }
    return found.sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  }
  function excerpt(section, asked, width = 200) {
    const found = hits(section.text, asked);
    const near = (from) => new Set(found.filter(([at]) => at >= from && at < from + width)
      .map(([at, to]) => section.text.slice(at, to).toLowerCase())).size;
    let from = found.reduce((best, [at]) => (near(at) > near(best) ? at : best), found[0]?.[0] ?? 0);
    from = from < 40 ? 0 : section.text.lastIndexOf(" ", from - 30) + 1;
    const part = section.text.slice(from, from + width);
    return [from, from + width < section.text.length ? part.slice(0, Math.max(part.lastIndexOf(" "), width / 2)) : part];
  }
  function make(tag, more, ...children) {
    const one = Object.assign(document.createElement(tag), more);
    one.append(...children);
    return one;
  }
  function marked(parent, text, asked) {
    let end = 0;
    for (const [from, to] of hits(text, asked)) {
      if (from < end) continue;
      parent.append(text.slice(end, from), make("mark", {}, text.slice(from, to)));
      end = to;
    }
    parent.append(text.slice(end));
  }
  function result(section, asked) {
    const link = make("a", { href: `${section.page}.html#${section.anchor}` });
    marked(link, section.heading, asked);
    const [from, text] = excerpt(section, asked), quote = make("p");
    marked(quote, `${from ? "… " : ""}${text}${from + text.length < section.text.length ? " …" : ""}`, asked);
    const where = section.heading === section.title ? "" : section.title;
    return make("li", {}, link, make("span", { className: "a2-where" }, where), quote);
  }
  // What to try where the book lacks a word.
  function suggestion(query, missing, none) {
    const instead = missing.map((word) => [word, nearest(word)]).filter(([, other]) => other);
    const line = make("p", { className: "a2-instead" });
    if (instead.length) {
      const other = instead.reduce((text, [word, near]) => text.replace(word, near), plain(query).trim());
      line.append("Did you mean ", make("a", { href: `?q=${encodeURIComponent(other)}` }, other), "? ");
    }
    if (none) line.append("The side bar lists every chapter, and ",
      make("a", { href: "questions.html" }, "the index"), " every question of the assignment.");
    return line;
  }
  function show(query, place) {
    const words = query.trim(), { asked, missing, found } = search(words);
    const lacking = missing.length && found.length ? `; none with “${missing.join("”, “")}”` : "";
    const status = make("p", {}, words ? `${found.length || "No"} section${found.length === 1 ? "" : "s"} with “${words}”${lacking}` : "");
    status.setAttribute("role", "status");
    const list = make("ul", { className: "a2-results" }, ...found.slice(0, 50).map((section) => result(section, asked)));
    place.replaceChildren(status, ...(words && missing.length ? [suggestion(query, missing, !found.length)] : []), list);
  }
  const place = document.getElementById("search-results");
  const query = new URLSearchParams(location.search).get("q") ?? "";
  for (const input of document.querySelectorAll("form.bd-search input[name=q]")) input.value = query;
  document.querySelector(".bd-search-container input[name=q]")?.addEventListener("input", (event) => show(event.target.value, place));
  show(query, place);
}
