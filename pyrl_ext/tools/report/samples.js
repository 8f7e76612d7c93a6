(function () {
  "use strict";
  var LISTED = 200, START = 160;
  var KINDS = {p: "prompt", s: "sampled", o: "observed", x: "remark"};
  var data = JSON.parse(document.getElementById("data").textContent), body = document.querySelector("[data-samples] tbody");

  function element(name, kind, text) {
    var made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function number(value) {
    return value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)));
  }
  function level(limits, test) { return limits.filter(test).length; }
  function tokens(sample) {
    var made = element("div", "tokens");
    made.dir = "auto";
    sample.texts.forEach(function (text, i) {
      var kind = KINDS[sample.kinds[i]], words = kind, tone = 0, logprob = sample.logprobs[i];
      var compared = sample.gaps.length > 0, gap = compared ? sample.gaps[i] : null, experts = sample.experts[i];
      if (kind === "sampled") {
        words += ", log-prob " + logprob;
        if (!compared) tone = level(data.tones.unlikely, function (limit) { return logprob < limit; });
        else if (gap === null) { tone = "missing"; words += "; no finite log-prob of the trainer"; }
        else {
          tone = level(data.tones.gaps, function (limit) { return Math.abs(gap) > limit; });
          words += "; trainer minus engine " + gap;
        }
      }
      var piece = element("bdi", kind + " tone-" + tone, text);
      piece.title = words + (experts ? "; experts " + experts : "");
      if (experts) piece.dataset.e = experts;
      made.append(piece);
    });
    return made;
  }
  function view(sample) {  // a sample with its tokens
    var made = element("article", "sample"), head = element("p"), parts = Object.entries(sample.parts);
    var words = parts.map(function (part) { return part[0] + " " + number(part[1]); });
    words.push(sample.name, sample.length + " tokens" + (sample.truncated ? ", truncated" : ""));
    words.push(sample.gaps.length ? "colored by the trainer's log-prob minus the engine's" : "colored by how unlikely the engine found a token");
    head.append(element("b", "", "reward " + number(sample.reward)), element("span", "quiet", " " + words.join(" · ")));
    made.append(head, tokens(sample));
    return made;
  }
  function underline(select) {
    var layer = select.selectedIndex;
    select.closest("section").querySelectorAll("[data-e]").forEach(function (token) {
      var expert = Number(token.dataset.e.split(" | ")[layer].split(" ")[0]);
      token.style.borderBottomColor = "hsl(" + expert * 137.5 % 360 + " 65% 55%)";
    });
  }
  function textOf(sample, prompt) {
    return sample.texts.filter(function (_, i) {
      return sample.kinds[i] !== "x" && (sample.kinds[i] === "p") === prompt;
    }).join("");
  }
  function start(text, words) {  // the beginning, or what is around the words
    var at = words ? text.toLowerCase().indexOf(words) : -1;
    var from = at > START / 2 ? at - START / 4 : 0;
    return (from ? "…" : "") + text.slice(from, from + START) + (text.length > from + START ? "…" : "");
  }
  function key(row, column) {
    if (column.startsWith("part ")) return row.sample.parts[column.slice(5)];
    return column in row ? row[column] : row.sample[column];
  }
  function compare(a, b) {  // missing numbers last
    var one = key(a, state.sort), two = key(b, state.sort), sign = state.down ? -1 : 1;
    if (one === null || one === undefined) return two === null || two === undefined ? 0 : 1;
    if (two === null || two === undefined) return -1;
    return one < two ? -sign : one > two ? sign : 0;
  }
  function list(rows, columns) {
    var words = state.search.toLowerCase();
    var found = rows.filter(function (row) { return row.text.includes(words); });
    if (state.sort) found.sort(compare);
    body.textContent = "";
    found.slice(0, LISTED).forEach(function (row) {
      var line = element("tr", "row" + (state.open.includes(row.id) ? " open" : ""));
      columns.forEach(function (column) {
        var cell = element("td", "cell-" + column.split(" ")[0]), value = key(row, column);
        if (column === "prompt" || column === "response") cell.append(element("bdi", "", start(value, words)));
        else if (column === "run") cell.append(element("i", "dot run-" + row.run % data.colours), data.names[row.run]);
        else if (column === "step") cell.append(element("button", "", number(value)));
        else cell.textContent = typeof value === "string" ? value : typeof value === "boolean" ? (value ? "yes" : "") : number(value);
        line.append(cell);
      });
      line.addEventListener("click", function () { open(row, line, columns.length); });
      body.append(line);
      if (state.open.includes(row.id)) unfold(row, line, columns.length);
    });
    var count = rows.length.toLocaleString("en") + " samples";
    var cut = rows.filter(function (row) { return row.sample.kinds.includes("x"); }).length;
    if (words) count = found.length.toLocaleString("en") + " of " + count + " contain it";
    if (words && cut) count += " in the parts shown; parts of " + cut.toLocaleString("en") + " are left out";
    document.querySelector("[data-found]").textContent = count + (found.length > LISTED ? "; the first " + LISTED + " are listed" : "");
  }
  function unfold(row, line, width) {
    var under = element("tr", "unfolded"), cell = element("td");
    cell.colSpan = width;
    cell.append(view(row.sample));
    under.append(cell);
    line.after(under);
  }
  function open(row, line, width) {
    var was = state.open.includes(row.id);
    state.open = state.open.filter(function (id) { return id !== row.id; });
    line.classList.toggle("open", !was);
    if (was) { line.nextSibling.remove(); return; }
    state.open.push(row.id);
    unfold(row, line, width);
  }
  function table() {
    var rows = [], box = document.querySelector("[data-search]"), heads = document.querySelectorAll("[data-sort]");
    data.samples.forEach(function (samples, run) {
      samples.forEach(function (sample) {
        var prompt = textOf(sample, true), response = textOf(sample, false);
        rows.push({
          id: [run, sample.set, sample.step, sample.name].join(" "), run: run, sample: sample, prompt: prompt,
          response: response, text: (prompt + "\n" + response).toLowerCase()
        });
      });
    });
    var columns = Array.from(heads, function (head) { return head.dataset.sort; });
    function show() {
      heads.forEach(function (head) {
        var order = state.down ? "descending" : "ascending";
        head.setAttribute("aria-sort", head.dataset.sort === state.sort ? order : "none");
      });
      list(rows, columns);
    }
    heads.forEach(function (head) {
      head.addEventListener("click", function () {
        state.down = head.dataset.sort === state.sort && !state.down;
        state.sort = head.dataset.sort;
        show();
      });
    });
    box.value = state.search;
    if (state.typing) box.focus({preventScroll: true});
    box.addEventListener("input", function () { state.search = box.value; show(); });
    show();
  }
  document.querySelectorAll("[data-best]").forEach(function (place) {
    var run = Number(place.dataset.best);
    data.best[run].forEach(function (row) { place.append(view(data.samples[run][row])); });
  });
  document.querySelectorAll("[data-route]").forEach(function (select) {
    select.addEventListener("change", function () { underline(select); });
    underline(select);
  });
  if (body) table();
})();
