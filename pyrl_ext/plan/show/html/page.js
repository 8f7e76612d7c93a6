(function () {
  "use strict";
  var cells = Array.from(document.querySelectorAll("[data-rank]"));
  var say = document.getElementById("groups-of");
  if (!say) return;
  function groups(cell) { return cell.dataset.groups.split(" ").filter(Boolean); }
  function choose(chosen) {
    var mine = groups(chosen), lists = {};
    cells.forEach(function (cell) {
      var shared = groups(cell).filter(function (group) { return mine.includes(group); });
      cell.classList.toggle("chosen", cell === chosen);
      cell.classList.toggle("with", cell !== chosen && shared.length > 0);
      var kinds = shared.map(function (group) { return group.split(":")[0]; });
      kinds.forEach(function (kind) { (lists[kind] = lists[kind] || []).push(cell.dataset.rank); });
      cell.querySelector(".shared").textContent = cell === chosen ? "" : kinds.join(" ");
    });
    var named = {};  // kinds with the same ranks are said once
    Object.keys(lists).forEach(function (kind) {
      var ranks = lists[kind].join(", ");
      (named[ranks] = named[ranks] || []).push(kind);
    });
    var words = Object.keys(named).map(function (ranks) { return named[ranks].join(" ") + " " + ranks; });
    say.textContent = "rank " + chosen.dataset.rank + ": " + (words.join(" · ") || "no groups");
  }
  cells.forEach(function (cell) {
    cell.addEventListener("mouseenter", function () { choose(cell); });
    cell.addEventListener("focus", function () { choose(cell); });
  });
})();
