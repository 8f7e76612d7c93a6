(function () {
  "use strict";
  var SPACE = {left: 66, right: 8, top: 8, bottom: 36};
  var data, drawn;

  function show(value) {
    if (value === null || value === undefined) return "–";
    var size = Math.abs(value);
    if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }
  function tick(value) {
    var size = Math.abs(value);
    if (size >= 1e4 || (size && size < 1e-3)) return value.toExponential(1).replace("e+", "e").replace(".0", "");
    return String(Number(value.toPrecision(6)));
  }
  function ticks(low, high, about) {
    var power = Math.pow(10, Math.floor(Math.log10((high - low) / about)));
    var step = [1, 2, 5, 10].map(function (n) { return n * power; })
      .find(function (n) { return n >= (high - low) / about * 0.999; });
    var found = [];
    for (var n = Math.ceil(low / step); n * step <= high * (1 + 1e-9) + 1e-300; n++) found.push(n * step);
    return found;
  }
  function smooth(values) {  // the mean of some values around each, as in the picture of a run
    var half = Math.floor(values.length / 50);
    return values.map(function (own, at) {
      var total = 0, count = 0;
      if (own === null) return null;
      for (var i = Math.max(0, at - half); i <= Math.min(values.length - 1, at + half); i++) {
        if (values[i] !== null) { total += values[i]; count++; }
      }
      return total / count;
    });
  }
  function curves(chart) {  // of the runs that are not hidden, the part in the zoom
    return chart.curves.filter(function (curve) { return !state.hidden.includes(curve.run); }).map(zoomed);
  }
  function zoomed(curve) {  // and a point before and behind it
    var xs = state.hours ? curve.hours : curve.steps, first = 0, last = xs.length - 1;
    if (state.zoom) {
      while (first < last && xs[first + 1] < state.zoom[0]) first++;
      while (last > first && xs[last - 1] > state.zoom[1]) last--;
    }
    function part(list) { return list && list.slice(first, last + 1); }
    var bad = curve.bad.filter(function (i) { return i >= first && i <= last; }).map(function (i) { return i - first; });
    return Object.assign({}, curve, {
      xs: part(xs), steps: part(curve.steps), y: part(curve.y), low: part(curve.low), high: part(curve.high), bad: bad
    });
  }
  function addHours(chart) {
    chart.curves.forEach(function (curve) {
      var known = data.hours[curve.run];
      curve.hours = known && curve.steps.map(function (step) { return known.hours[nearest(known.steps, step)]; });
    });
  }
  function escape(text) {
    return String(text).replace(/[&<>"']/g, function (c) { return "&#" + c.charCodeAt(0) + ";"; });
  }
  function extent(lists) {
    var low = Infinity, high = -Infinity;
    lists.forEach(function (list) {
      list.forEach(function (v) { if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } });
    });
    return low <= high ? [low, high] : [0, 1];
  }
  function range(chart, shown) {  // of the vertical axis, in its scale
    var within = extent(shown.map(function (curve) { return curve.y; }));
    shown.forEach(function (curve) {
      var more = curve.low ? extent([curve.low, curve.high]) : within, room = 0.6 * (within[1] - within[0]);
      if (!chart.log) within = [Math.max(more[0], within[0] - room), Math.min(more[1], within[1] + room)];
    });
    if (chart.log) return within.map(Math.log10);
    var pad = 0.06 * (within[1] - within[0]) || 0.1 * Math.abs(within[1]) || 1;
    return [within[0] - (within[0] === 0 ? 0.3 : 1) * pad, within[1] + pad];
  }
  function path(xs, ys) {
    var words = [], up = true;
    ys.forEach(function (y, i) {
      if (y === null) { up = true; return; }
      words.push((up ? "M" : "L") + xs[i].toFixed(1) + " " + y.toFixed(1));
      up = false;
    });
    return words.join("");
  }
  function draw(figure) {
    var chart = data.charts[figure.dataset.chart], plot = figure.querySelector(".plot");
    var width = plot.clientWidth, height = plot.clientHeight, shown = curves(chart), out = [];
    if (!width) return;
    var x = state.zoom || extent(shown.map(function (c) { return c.xs; })), y = range(chart, shown);
    if (x[0] === x[1]) x = [x[0] - 1, x[1] + 1];
    if (y[0] === y[1]) y = [y[0] - 0.5, y[1] + 0.5];
    var inner = {x: width - SPACE.left - SPACE.right, y: height - SPACE.top - SPACE.bottom};
    function px(at) { return SPACE.left + (at - x[0]) / (x[1] - x[0]) * inner.x; }
    function py(value) {
      if (value === null) return null;
      var at = ((chart.log ? Math.log10(value) : value) - y[0]) / (y[1] - y[0]);
      return SPACE.top + (1 - Math.min(1.02, Math.max(-0.02, at))) * inner.y;
    }
    var bottom = height - SPACE.bottom;
    var marks = ticks(y[0], y[1], Math.max(2, inner.y / 38)).map(function (v) { return chart.log ? Math.pow(10, v) : v; });
    marks.forEach(function (value) {
      out.push("<line class='grid' x1='" + SPACE.left + "' x2='" + (width - SPACE.right) + "' y1='" + py(value) + "' y2='" + py(value) + "'/>");
      out.push("<text text-anchor='end' x='" + (SPACE.left - 6) + "' y='" + (py(value) + 4) + "'>" + tick(value) + "</text>");
    });
    ticks(x[0], x[1], Math.max(2, inner.x / 90)).forEach(function (at) {
      if ((state.hours || at === Math.round(at)) && at >= 0 && px(at) < width - 12) {
        out.push("<text text-anchor='middle' x='" + px(at) + "' y='" + (height - 21) + "'>" + (state.hours ? tick(at) : at.toLocaleString("en")) + "</text>");
      }
    });
    var middle = SPACE.top + inner.y / 2, unit = [chart.unit, chart.log ? "log scale" : ""].filter(Boolean).join(", ");
    out.push("<text class='axis' text-anchor='middle' x='" + (SPACE.left + inner.x / 2) + "' y='" + (height - 5) + "'>" + (state.hours ? "hours of the run" : "step") + "</text>");
    out.push("<text class='axis' text-anchor='middle' transform='translate(12 " + middle + ") rotate(-90)'>" + escape(unit) + "</text>");
    out.push("<clipPath id='clip-" + drawn.indexOf(figure) + "'><rect x='" + SPACE.left + "' width='" + inner.x + "' height='" + height + "'/></clipPath>");
    out.push("<g clip-path='url(#clip-" + drawn.indexOf(figure) + ")'>");
    (chart.band || []).forEach(function (value, i) {
      var at = py(chart.log && value <= 0 ? null : value);
      if (at !== null && at > SPACE.top && at < bottom) out.push("<line class='" + ["warn", "alarm"][i] + "' x1='" + SPACE.left + "' x2='" + (width - SPACE.right) + "' y1='" + at + "' y2='" + at + "'/>");
    });
    var labels = Array.from(new Set(shown.map(function (c) { return c.held ? "" : c.label; }))), ends = [];
    shown.forEach(function (curve) {
      var xs = curve.xs.map(px), colour = "run-" + curve.run % COLOURS;
      if (curve.low) {
        var back = xs.map(function (_, i) { return xs.length - 1 - i; }).filter(function (i) { return curve.y[i] !== null; });
        var there = back.slice().reverse(), outline = there.concat(back);
        out.push("<path class='spread fill " + colour + "' d='" + path(outline.map(function (i) { return xs[i]; }),
          there.map(function (i) { return py(curve.high[i]); }).concat(back.map(function (i) { return py(curve.low[i]); }))) + "Z'/>");
      }
      var calm = curve.held || chart.family ? curve.y : smooth(curve.y), shade = "";
      if (labels.length > 1 && !curve.held) shade = " style='stroke-opacity:" + (1 - 0.75 * labels.indexOf(curve.label) / labels.length).toFixed(2) + "'";
      if (calm !== curve.y && curve.y.length >= 50 && !curve.low) out.push("<path class='raw " + colour + "' d='" + path(xs, curve.y.map(py)) + "'/>");
      out.push("<path class='" + colour + (curve.held ? " held" : "") + "'" + shade + " d='" + path(xs, calm.map(py)) + "'/>");
      if (curve.held || xs.length === 1) xs.forEach(function (x, i) {
        if (curve.y[i] !== null) out.push("<circle class='fill " + colour + "' r='" + (xs.length > 60 ? 2 : 3) + "' cx='" + x + "' cy='" + py(curve.y[i]) + "'/>");
      });
      curve.bad.forEach(function (i) {
        out.push("<text class='bad' text-anchor='middle' x='" + xs[i] + "' y='" + (bottom - 2) + "'>×</text>");
      });
    });
    out.push("</g><rect class='select' y='" + SPACE.top + "' height='" + inner.y + "' visibility='hidden'/>");
    out.push("<line class='cursor' y1='" + SPACE.top + "' y2='" + bottom + "' visibility='hidden'/>");
    plot.innerHTML = "<svg width='" + width + "' height='" + height + "' role='img' aria-label='" + escape(figure.dataset.chart) + " by " + (state.hours ? "hours" : "step") + "'>" + out.join("") + "</svg>";
    figure.px = px;
    figure.xAt = function (at) {
      return x[0] + Math.min(1, Math.max(0, (at - SPACE.left) / inner.x)) * (x[1] - x[0]);
    };
    read(figure, null);
  }
  function nearest(list, at) {
    var low = 0, high = list.length - 1;
    while (high - low > 1) {
      var middle = (low + high) >> 1;
      if (list[middle] > at) high = middle; else low = middle;
    }
    return Math.abs(list[low] - at) <= Math.abs(list[high] - at) ? low : high;
  }
  function read(figure, at) {  // the numbers at a place of the x axis; the last ones without
    var chart = data.charts[figure.dataset.chart], words = [], cursor = figure.querySelector(".cursor");
    var shown = curves(chart), head = "";
    shown.forEach(function (curve, n) {
      var i = at === null ? curve.xs.length - 1 : nearest(curve.xs, at);
      if (!n && at !== null) {
        head = "<span>step " + Math.round(curve.steps[i]).toLocaleString("en") + (state.hours ? ", " + show(curve.xs[i]) + " h" : "") + "</span>";
        if (cursor) ["x1", "x2"].forEach(function (end) { cursor.setAttribute(end, figure.px(curve.xs[i])); });
      }
      if (shown.length > 8 && at === null) return;
      var spread = curve.low && at !== null && shown.length < 3 ? " (" + show(curve.low[i]) + " to " + show(curve.high[i]) + ")" : "";
      var label = curve.held ? "held out " : curve.label ? curve.label + ": " : "";
      words.push("<span><i class='dot run-" + curve.run % COLOURS + "'></i>" + escape(label) + show(curve.y[i]) + spread + "</span>");
    });
    figure.querySelector("output").innerHTML = head + words.join("");
    if (cursor) cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
  }
  function all(at) {
    drawn.forEach(function (figure) { if (figure.querySelector("svg") && figure.offsetParent) read(figure, at); });
  }
  function zoom(range) {
    state.zoom = range;
    document.querySelector("[data-whole]").hidden = range === null;
    redraw();
  }
  function follow(figure) {  // the pointer: it reads numbers, and a drag zooms all charts
    var plot = figure.querySelector(".plot"), from = null;
    function place(event) { return event.clientX - plot.getBoundingClientRect().left; }
    plot.addEventListener("pointermove", function (event) {
      var to = place(event), box = plot.querySelector(".select");
      all(figure.xAt(to));
      box.setAttribute("visibility", from === null ? "hidden" : "visible");
      if (from === null) return;
      box.setAttribute("x", Math.min(from, to));
      box.setAttribute("width", Math.abs(from - to));
    });
    plot.addEventListener("pointerdown", function (event) {
      if (event.button) return;  // not the left one
      from = place(event);
      plot.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    plot.addEventListener("pointerup", function (event) {
      if (from === null) return;  // pressed elsewhere
      var to = place(event), ends = [figure.xAt(from), figure.xAt(to)].sort(function (a, b) { return a - b; });
      if (Math.abs(from - to) > 6 && ends[0] < ends[1]) zoom(ends);
      from = null;
    });
    plot.addEventListener("pointercancel", function () { from = null; });
    plot.addEventListener("dblclick", function () { zoom(null); });
    plot.addEventListener("pointerleave", function () { all(null); });
  }
  function redraw() {
    drawn.forEach(function (figure) { if (figure.offsetParent) draw(figure); });
  }
  function table(box) {  // rows of a heat map: their labels, and numbers by column
    var of = Number(box.dataset.of);
    if (box.dataset.heat === "load") {
      return data.load[of].layers.map(function (layer, i) { return {label: layer, values: data.load[of].values[i]}; });
    }
    return data.charts["route/agree_topk/layer_<id>"].curves.filter(function (curve) { return curve.run === of; })
      .map(function (curve) { return {label: curve.label, values: curve.y, steps: curve.steps}; });
  }
  function heat(box) {
    var rows = table(box), canvas = box.querySelector("canvas"), load = box.dataset.heat === "load";
    var columns = Math.max.apply(null, rows.map(function (row) { return row.values.length; }));
    var low = Number(box.dataset.low), pen = canvas.getContext("2d"), say = box.querySelector("output");
    var most = load ? Math.max.apply(null, rows.map(function (row) { return Math.max.apply(null, row.values); })) : 1;
    canvas.width = columns; canvas.height = rows.length;
    canvas.style.height = rows.length * Math.max(5, Math.min(18, 320 / rows.length)) + "px";
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--heat");
    rows.forEach(function (row, y) {
      row.values.forEach(function (value, x) {
        if (value === null) return;
        pen.globalAlpha = load ? value / (most || 1) : Math.min(1, (1 - value) / (1 - low || 1));
        pen.fillRect(x, y, 1, 1);
      });
    });
    say.textContent = "layers " + rows[0].label + " to " + rows[rows.length - 1].label + " from above";
    canvas.addEventListener("pointermove", function (event) {
      var frame = canvas.getBoundingClientRect();
      var x = Math.min(columns - 1, Math.floor((event.clientX - frame.left) / frame.width * columns));
      var row = rows[Math.min(rows.length - 1, Math.floor((event.clientY - frame.top) / frame.height * rows.length))];
      if (!row || x < 0) return;
      say.textContent = "layer " + row.label + ", " + (load ? "expert " + x : "step " + row.steps[x]) + ": " + show(row.values[x]);
    });
  }
  function begin() {
    data = JSON.parse(document.getElementById("data").textContent);
    drawn = Array.from(document.querySelectorAll("[data-chart]"));
    Object.values(data.charts).forEach(addHours);
    drawn.forEach(follow);
    document.querySelectorAll(".words").forEach(function (each) {
      each.addEventListener("click", function () { each.classList.toggle("whole"); });
    });
    document.querySelectorAll("details").forEach(function (each) {
      if (each.id in state.details) each.open = state.details[each.id];
      each.addEventListener("toggle", function () { state.details[each.id] = each.open; redraw(); });
    });
    document.querySelectorAll("[data-run]").forEach(function (box) {
      var run = Number(box.dataset.run);
      box.checked = !state.hidden.includes(run);
      box.addEventListener("change", function () {
        state.hidden = state.hidden.filter(function (each) { return each !== run; });
        if (!box.checked) state.hidden.push(run);
        redraw();
      });
    });
    var axis = document.querySelector("[data-axis]");
    state.hours = state.hours && data.hours.every(Boolean);
    axis.value = state.hours ? "hours" : "step";
    axis.addEventListener("change", function () {
      state.hours = axis.value === "hours";
      zoom(null);
    });
    document.querySelector("[data-whole]").addEventListener("click", function () { zoom(null); });
    document.querySelectorAll("[data-heat]").forEach(heat);
    zoom(state.zoom);
  }
  var COLOURS = 8, timer;
  begin();
  addEventListener("resize", function () { clearTimeout(timer); timer = setTimeout(redraw, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () {
    document.querySelectorAll("[data-heat]").forEach(heat);
  });
})();
