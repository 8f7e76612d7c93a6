// What the reader has set on the page; a reload keeps it.
var state = {zoom: null, hours: false, hidden: [], details: {}, search: "", sort: "", down: false, open: [], scroll: [0, 0], typing: false};
(function () {
  "use strict";
  var key = "report " + location.pathname, watched = document.body.dataset.watch;
  function stored(use) {  // browsers may deny a page its storage: nothing is kept then
    try { return use(); } catch (error) { return null; }
  }
  Object.assign(state, JSON.parse(stored(function () { return sessionStorage.getItem(key); }) || "{}"));
  function table() { return document.querySelector(".samples") || {}; }
  addEventListener("load", function () {
    scrollTo(0, state.scroll[0]);
    table().scrollTop = state.scroll[1];
  });
  addEventListener("pagehide", function () {
    state.scroll = [scrollY, table().scrollTop];
    state.typing = document.activeElement.matches("[data-search]");
    stored(function () { sessionStorage.setItem(key, JSON.stringify(state)); });
  });
  if (watched) setInterval(function () {
    fetch("version").then(function (answer) { return answer.text(); }).then(function (version) {
      if (version !== watched && !document.querySelector(":active")) location.reload();
    }, function () {});  // the server has ended: the page stays as it is
  }, 2000);
})();
