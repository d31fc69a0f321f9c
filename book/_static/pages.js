// Definitions of terms show when a link to the glossary is hovered or has the focus. A finger can do
// neither: its first tap shows the definition, the second follows the link. Escape hides it.
let shown = null;
addEventListener("click", (event) => {
  const term = event.target.closest("a.term");
  if (term && term !== shown && event.pointerType === "touch") {
    event.preventDefault();
    term.focus();
  }
  shown = term;
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.activeElement.closest("a.term")?.blur();
});

// Paper is white: a dark page is printed with the colours of a light one.
const page = document.documentElement;
let theme = "";
addEventListener("beforeprint", () => ([theme, page.dataset.theme] = [page.dataset.theme, "light"]));
addEventListener("afterprint", () => (page.dataset.theme = theme));
