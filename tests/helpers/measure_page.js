// Measures the page as laid out, and leaves what is wrong in its title as JSON.
addEventListener("load", function () {
  var root = document.documentElement, wrong = [];
  function note(what, node) { wrong.push(what + ": " + node.textContent.trim().slice(0, 60)); }
  function apart(a, b) {
    return a.right <= b.left + 1 || b.right <= a.left + 1 ||
           a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
  }
  function colour(node) {
    var style = getComputedStyle(node), rgb = style.fill.match(/[\d.]+/g).map(Number);
    var back = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g).map(Number);
    var alpha = Number(style.fillOpacity);
    return [0, 1, 2].map(function (i) { return alpha * rgb[i] + (1 - alpha) * back[i]; });
  }
  function light(rgb) {
    var linear = rgb.map(function (v) {
      v /= 255; return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  }
  document.querySelectorAll("main svg").forEach(function (svg) {
    var frame = svg.getBoundingClientRect(), texts = Array.from(svg.querySelectorAll("text"));
    var boxes = texts.map(function (node) { return node.getBoundingClientRect(); });
    boxes.forEach(function (box, i) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
          box.bottom > frame.bottom + 3) note("outside its picture", texts[i]);
      for (var j = 0; j < i; j++) if (!apart(box, boxes[j])) note("on another text", texts[i]);
    });
    svg.querySelectorAll("g > text").forEach(function (label) {
      var rect = label.parentNode.querySelector("rect");
      var inner = label.getBoundingClientRect(), outer = rect.getBoundingClientRect();
      if (inner.left < outer.left || inner.right > outer.right) note("wider than its box", label);
      var a = light(colour(label)), b = light(colour(rect));
      var contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < 4.5) note("contrast " + contrast.toFixed(1), label);
    });
  });
  document.querySelectorAll(".scroll, td, th, dd, p, h1, h2").forEach(function (node) {
    if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth) note("cut off", node);
  });
  var cell = document.querySelectorAll("[data-rank]")[RANK], shared = null;
  if (cell) {
    cell.dispatchEvent(new MouseEvent("mouseenter"));
    shared = Array.from(document.querySelectorAll(".with"));
    shared = shared.map(function (node) { return node.dataset.rank; });
  }
  document.title = JSON.stringify({
    width: root.scrollWidth, height: root.scrollHeight, wrong: wrong, shared: shared,
    said: (document.getElementById("groups-of") || {}).textContent
  });
});
