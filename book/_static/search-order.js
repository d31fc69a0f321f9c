// How search orders what it finds: pages by their titles, terms of the glossary, sections, texts, and
// functions last. Part of Sphinx's own search, whose results are [page, title, anchor, kind, score].
var Scorer = {
  objNameMatch: 1, objPartialMatch: 0, objPrio: {}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([, title, anchor, kind, score]) => {
    const query = new URLSearchParams(location.search).get("q") ?? "";
    const word = query.trim().replace(/s$/i, "").replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const named = word && new RegExp(`\\b${word}`, "i").test(title.split(" > ").pop());
    if (kind && title === query.trim()) return 300; // a function or a class
    if (kind) return title.split(".").pop() === query.trim() ? 200 : score;
    if (anchor.startsWith("#term-")) return score + 100;
    return named ? score + (anchor ? 100 : 200) : score;
  },
};
// An excerpt starts with the text of a page, not with what stands beside it.
const textOf = Search.htmlToText;
Search.htmlToText = (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll("#jb-print-docs-body, .chapter-line, .hint, .live").forEach((it) => it.remove());
  return textOf(page.documentElement.outerHTML, anchor);
};
