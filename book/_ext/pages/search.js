// Search over A2_TEXTS (texts.js): [page, title, anchor, heading, text, number cells, weight].
// Every word must occur; a section's rank says where. Texts become text nodes, never HTML.
{
  const plain = (text) => text.normalize("NFKC").toLowerCase();
  const index = A2_TEXTS.map(([page, title, anchor, heading, text, cells, weight]) => ({
    page, title, anchor, heading, text, weight,
    head: plain(heading), body: plain(`${text} ${cells}`),
  }));

  function count(word, where, atStart, inside) {
    const at = where.indexOf(word);
    if (at < 0) return 0;
    const starts = [...where.matchAll(/[\p{L}\p{N}]+/gu)].some((m) => m[0].startsWith(word));
    return starts || at === 0 || /\s/.test(where[at - 1]) ? atStart : inside;
  }
  function rank(section, words, phrase) {
    let sum = 0;
    for (const word of words) {
      const points = count(word, section.head, 20, 8) + count(word, section.body, 4, 1);
      if (!points) return 0;
      sum += points;
    }
    if (words.length > 1 && `${section.head} ${section.body}`.includes(phrase)) sum += 15;
    return sum * section.weight;
  }
  function hits(text, words) {
    const found = [];
    const low = text.toLowerCase();
    for (const word of words)
      for (let at = low.indexOf(word); at >= 0; at = low.indexOf(word, at + 1)) found.push([at, word]);
    return found.sort((a, b) => a[0] - b[0]);
  }
  function excerpt(section, words, width = 200) {
    const found = hits(section.text, words);
    const near = (from) => new Set(found.filter(([at]) => at >= from && at < from + width).map((h) => h[1])).size;
    let from = found.reduce((best, [at]) => (near(at) > near(best) ? at : best), found[0]?.[0] ?? 0);
    from = from < 40 ? 0 : section.text.lastIndexOf(" ", from - 30) + 1;
    const part = section.text.slice(from, from + width);
    return [from, from + width < section.text.length ? part.slice(0, Math.max(part.lastIndexOf(" "), width / 2)) : part];
  }
  function marked(parent, text, words) {
    let end = 0;
    for (const [at, word] of hits(text, words)) {
      if (at < end) continue;
      parent.append(text.slice(end, at), Object.assign(document.createElement("mark"), { textContent: text.slice(at, at + word.length) }));
      end = at + word.length;
    }
    parent.append(text.slice(end));
  }
  function show(query, place) {
    const phrase = plain(query).trim().replace(/\s+/g, " ");
    const words = [...new Set(phrase.split(" "))].filter(Boolean);
    const found = words.length
      ? index.map((section) => [rank(section, words, phrase), section]).filter(([points]) => points).sort((a, b) => b[0] - a[0])
      : [];
    const status = Object.assign(document.createElement("p"), { textContent: words.length ? `${found.length || "No"} section${found.length === 1 ? "" : "s"} with “${query.trim()}”` : "" });
    status.setAttribute("role", "status");
    const list = document.createElement("ul");
    list.className = "a2-results";
    for (const [, section] of found.slice(0, 50)) {
      const item = document.createElement("li");
      const link = Object.assign(document.createElement("a"), { href: `${section.page}.html#${section.anchor}` });
      marked(link, section.heading, words);
      const [from, text] = excerpt(section, words);
      const quote = document.createElement("p");
      marked(quote, `${from ? "… " : ""}${text}${from + text.length < section.text.length ? " …" : ""}`, words);
      const where = Object.assign(document.createElement("span"), { className: "a2-where", textContent: section.heading === section.title ? "" : section.title });
      item.append(link, where, quote);
      list.append(item);
    }
    place.replaceChildren(status, list);
  }
  const place = document.getElementById("search-results");
  const query = new URLSearchParams(location.search).get("q") ?? "";
  for (const input of document.querySelectorAll("form.bd-search input[name=q]")) input.value = query;
  document.querySelector(".bd-search-container input[name=q]")?.addEventListener("input", (event) => show(event.target.value, place));
  show(query, place);
}
