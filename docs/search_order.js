// Pages come before the examples, these before the API reference, and that before the changelog and source code, unless
// a name of the API is typed as it is spelled. Sphinx calls `score` for each result: [docname, title, anchor, descr,
// score, filename, kind]. The numbers below are Sphinx's own.
var Scorer = {
  score: ([docname, title, , , score, , kind]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    if (kind === "object" && /[A-Z_]/.test(query) && title.split(".").pop() === query) return score + 100;
    if (/^(changelog|_modules\/)/.test(docname)) return score - 300;
    if (/^(api|commands)\//.test(docname)) return score - 200;
    if (/^gallery\//.test(docname)) return score - 100;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
