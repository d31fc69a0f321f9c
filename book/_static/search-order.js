// How search orders what it finds: pages by their titles, terms of the glossary, sections, texts, and
// functions last; of equal ones the earlier chapter. Part of Sphinx's own search, whose results are
// [page, title, anchor, kind, score].
const SAME = { "cache line": "sector", layernorm: "norm", ncu: "Nsight Compute", vectorized: "vectorised" };
const meant = (query) => SAME[query.trim().toLowerCase()] ?? query.trim();
var Scorer = {
  objNameMatch: 1, objPartialMatch: 0, objPrio: {}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([, title, anchor, kind, score]) => {
    const query = meant(new URLSearchParams(location.search).get("q") ?? "");
    const word = query.replace(/s$/i, "").replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const named = word && new RegExp(`\\b${word}`, "i").test(title.split(" > ").pop());
    if (kind && title === query) return 300; // a function or a class
    if (kind) return title.split(".").pop() === query ? 200 : score;
    if (anchor.startsWith("#term-")) return score + 100;
    const later = (title.match(/section-number">(\d+)/)?.[1] ?? 99) / 100;
    return score - later + (named ? (anchor ? 100 : 200) : 0);
  },
};
const parse = Search._parseQuery;
Search._parseQuery = (query) => parse(meant(query));
// An excerpt starts with the text of a page, not with what stands beside it.
const textOf = Search.htmlToText;
Search.htmlToText = (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll("#jb-print-docs-body, .chapter-line, .hint, .live").forEach((it) => it.remove());
  return textOf(page.documentElement.outerHTML, anchor);
};
