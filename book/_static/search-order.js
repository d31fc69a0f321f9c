// How search orders what it finds: pages by their titles, terms of the glossary, sections, texts, and
// functions last; of equal ones the earlier chapter. Part of Sphinx's own search, whose results are
// [page, title, anchor, kind, score].
const NAMES = []; // of each term of the glossary: memtraffic_site fills it in
let asked = "";
var Scorer = {
  objNameMatch: 1, objPartialMatch: 0, objPrio: {}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([, title, anchor, kind, score]) => {
    const query = asked.trim(), word = query.replace(/s$/i, "").replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const named = word && new RegExp(`\\b${word}`, "i").test(title.split(" > ").pop());
    if (kind && title === query) return 300; // a function or a class
    if (kind) return title.split(".").pop() === query ? 200 : score;
    if (anchor.startsWith("#term-")) return score + 100;
    const later = (title.match(/section-number">(\d+)/)?.[1] ?? 99) / 100;
    return score - later + (named ? (anchor ? 100 : 200) : 0);
  },
};
// Who asks for one name of a term also finds what is said of the others; its entry once.
const find = Search._performSearch, search = (name) => find(...Search._parseQuery(asked = name));
Search._performSearch = (query) => {
  const word = query.trim().toLowerCase(), fits = (name) => [name, `${name}s`].includes(word);
  const names = NAMES.find((it) => it.some(fits)) ?? [query];
  const own = names.find(fits) ?? query, others = names.filter((name) => name !== own);
  if (!others.length) return search(query);
  const found = [...others.flatMap(search).filter(([, , anchor]) => !anchor.startsWith("#term-")), ...search(own)];
  const last = new Map(found.sort((a, b) => a[4] - b[4]).map((it) => [it.slice(0, 4).join(), it]));
  return found.filter((it) => last.get(it.slice(0, 4).join()) === it);
};
// An excerpt starts with the text of a page, not with what stands beside it.
const textOf = Search.htmlToText;
Search.htmlToText = (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll("#jb-print-docs-body, .chapter-line, .hint, .live").forEach((it) => it.remove());
  return textOf(page.documentElement.outerHTML, anchor);
};
