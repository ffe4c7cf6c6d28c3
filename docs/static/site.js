// Let a keyboard scroll what is wider than the window, and complete the theme's descriptions.
function describePage() {
  for (const element of document.querySelectorAll("pre, .table-wrapper, article p:has(> img)")) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
  }
  for (const caption of document.querySelectorAll(".sidebar-tree .caption")) {
    caption.setAttribute("aria-level", "2");
  }
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Site");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "Page");
}

window.addEventListener("load", describePage);
window.addEventListener("resize", describePage);
