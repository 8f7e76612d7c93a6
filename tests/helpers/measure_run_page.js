// Opens every part of the report's page, points at its first chart, and leaves what it found in the
// title as JSON.
addEventListener("load", function () {
  var root = document.documentElement, wrong = [];
  function note(what, node) { wrong.push(what + ": " + node.textContent.trim().slice(0, 60)); }
  var first = document.querySelectorAll("main .first .chart").length;
  document.querySelectorAll("details").forEach(function (each) { each.open = true; });
  setTimeout(function () {
    var charts = Array.from(document.querySelectorAll(".chart")), paths = {};
    charts.forEach(function (chart) {
      var frame = chart.querySelector(".plot").getBoundingClientRect();
      paths[chart.dataset.chart] = chart.querySelectorAll("path").length;
      chart.querySelectorAll(".plot text").forEach(function (text) {
        var box = text.getBoundingClientRect();
        if (box.left < frame.left - 2 || box.right > frame.right + 2) note("outside its plot", text);
      });
      if (/NaN|undefined/.test(chart.querySelector(".plot").innerHTML)) note("no number", chart);
    });
    document.querySelectorAll("td, th, dd, p:not(.words), h1, h2, li, figcaption").forEach(function (node) {
      if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth) note("cut off", node);
    });
    var plot = charts[0].querySelector(".plot"), box = plot.getBoundingClientRect();
    var at = charts[0].px(30) + box.left;
    plot.dispatchEvent(new PointerEvent("pointermove", {clientX: at, clientY: box.top + 9}));
    document.title = JSON.stringify({
      width: root.scrollWidth, wrong: wrong, charts: charts.length, first: first, paths: paths,
      drawn: charts.filter(function (chart) { return chart.querySelector("svg"); }).length,
      said: charts[0].querySelector("output").textContent
    });
  }, 200);
});
