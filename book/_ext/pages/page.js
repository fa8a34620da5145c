// Loaded by every page. Nothing here is needed to read it.
{
  // A picture follows the theme, and so does paper: print in the light one.
  let themeBefore;
  addEventListener("beforeprint", () => {
    themeBefore = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
  });
  addEventListener("afterprint", () => {
    if (themeBefore !== undefined) document.documentElement.dataset.theme = themeBefore;
  });

  // What is wider than its column can be reached by keyboard, and says so while there is more to see.
  function watch(box) {
    const label = box.querySelector("caption, .caption-text")?.textContent.trim();
    const kind = box.matches("div.math") ? "equation" : box.matches("pre") ? "code" : "table";
    const look = () => {
      const wide = box.scrollWidth > box.clientWidth + 1;
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
    const observer = new ResizeObserver(look);
    observer.observe(box);
    if (box.firstElementChild) observer.observe(box.firstElementChild);
    look();
  }
  function start() {
    document
      .querySelectorAll("article :is(.pst-scrollable-table-container, div.math, pre), article .cell_output > .output")
      .forEach(watch);
  }
  if (window.MathJax?.startup?.promise) MathJax.startup.promise.then(start);
  else if (document.querySelector("script[src*='mathjax']"))
    addEventListener("load", () => (MathJax.startup?.promise ?? Promise.resolve()).then(start));
  else start();
}
