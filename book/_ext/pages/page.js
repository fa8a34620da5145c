// Loaded by every page. Nothing here is needed to read it.
{
  // A picture follows the theme, and so does paper: print in the light one, with every fold open.
  let themeBefore, opened = [];
  addEventListener("beforeprint", () => {
    themeBefore = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    opened = [...document.querySelectorAll("article details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => {
    if (themeBefore !== undefined) document.documentElement.dataset.theme = themeBefore;
    for (const fold of opened) fold.open = false;
  });

  // What an address ends at is shown, also within a fold or as one.
  function unfold() {
    const target = document.getElementById(location.hash.slice(1));
    let folded = false;
    for (let one = target; one; one = one.parentElement)
      if (one.matches("article details:not([open])")) folded = one.open = true;
    if (folded) target.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  addEventListener("click", ({ target }) => {  // of a link to where the address is already
    if (target.closest?.("a[href]")?.href === location.href) unfold();
  });

  // A click on a figure, or on the button by its caption, shows it as large as the window.
  let large;
  function frame() {
    large = document.createElement("dialog");
    large.className = "a2-large";
    large.setAttribute("aria-labelledby", "a2-large-caption");
    large.innerHTML = '<form method="dialog"><button autofocus>Close</button></form>'
      + '<div tabindex="0" role="group" aria-label="The figure, scrolls"><img></div>'
      + '<p id="a2-large-caption"></p>';
    large.addEventListener("click", ({ target }) => {
      if (target === large || target.tagName === "IMG") large.close();
    });
    document.body.append(large);
  }
  function enlarge(image, line) {
    if (!large) frame();
    const shown = large.querySelector("img"), ratio = image.naturalWidth / image.naturalHeight;
    const { width } = image.getBoundingClientRect();
    shown.src = image.src;
    shown.alt = image.alt;
    shown.style.width = `max(min(${2 * width}px, 44rem), min(92vw, ${78 * ratio}vh))`;
    const caption = line.cloneNode(true);
    caption.querySelectorAll("a, button").forEach((one) => one.remove());
    large.querySelector("p").replaceChildren(...caption.childNodes);
    large.showModal();
  }
  for (const figure of document.querySelectorAll("article figure:has(img):has(figcaption)")) {
    const image = figure.querySelector("img"), line = figure.querySelector("figcaption p");
    const button = Object.assign(document.createElement("button"),
      { type: "button", className: "a2-enlarge", textContent: "Enlarge" });
    const number = line.querySelector(".caption-number") ?? line;
    button.setAttribute("aria-label", `Enlarge ${number.textContent.trim()}`);
    button.addEventListener("click", () => enlarge(image, line));
    image.addEventListener("click", () => button.click());
    line.append(" ", button);
  }

  // For screen readers: a landmark around the title, and a name for what shows an icon alone.
  const title = document.querySelector(".sidebar-primary-item:has(> .navbar-brand)");
  title?.setAttribute("role", "navigation");
  title?.setAttribute("aria-label", "Home");
  for (const one of document.querySelectorAll(".citation-list, .citation"))
    one.removeAttribute("role");  // which these may not have
  for (const toggle of document.querySelectorAll(".bd-sidebar-primary summary")) {
    const link = toggle.closest("li").querySelector("a");
    toggle.setAttribute("aria-label", `Pages of ${link.textContent.trim()}`);
  }

  // What is wider than its column can be reached by keyboard, and says so while there is more to see.
  function watch(box) {
    const label = box.querySelector("caption, .caption-text")?.textContent.trim();
    const kind = box.matches("div.math") ? "equation" : box.matches("pre") ? "code" : "table";
    const look = () => {
      const wide = box.scrollWidth > box.clientWidth;
      box.classList.toggle("a2-wide", wide);
      box.classList.toggle("a2-more", wide && box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
      if (!wide) return ["tabindex", "role", "aria-label"].forEach((name) => box.removeAttribute(name));
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", `${label || kind}, scrolls sideways`);
      const key = box.querySelector("thead th");
      if (key) box.style.setProperty("--a2-first", `${key.offsetWidth}px`);
    };
    box.addEventListener("scroll", look, { passive: true });
    const observer = new ResizeObserver(look); // looks once at first as well
    observer.observe(box);
    if (box.firstElementChild) observer.observe(box.firstElementChild);
  }
  function start() {
    unfold();
    document
      .querySelectorAll("article :is(.pst-scrollable-table-container, div.math, pre), article .cell_output > .output")
      .forEach(watch);
  }
  if (window.MathJax?.startup?.promise) MathJax.startup.promise.then(start);
  else if (document.querySelector("script[src*='mathjax']"))
    addEventListener("load", () => (MathJax.startup?.promise ?? Promise.resolve()).then(start));
  else start();
}
