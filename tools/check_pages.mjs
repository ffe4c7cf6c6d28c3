// Check pages of the built site in headless Chromium, light and dark, wide and narrow: the rules of
// axe-core (contrast, descriptions, targets that a finger can hit, languages, structure), and content
// that is wider than the window. If a directory for pictures is given, those of the pages are written
// there, and preview.png of the front page, which docs/static has for previews of links.
//
// It is run by hand after `make docs`, with packages that are not requirements of the project:
//
//     npm install --prefix build/npm playwright-core axe-core
//     node tools/check_pages.mjs build/site [PICTURES]

import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const PAGES = [
  "index.html",
  "installation.html",
  "tutorial/processes.html",
  "tutorial/trainer.html",
  "train-your-model.html",
  "when-a-job-hangs-or-dies.html",
  "reference/api.html",
  "reference/api/train.html",
  "reference/cli/run.html",
  "reference/exceptions.html",
  "design/architecture.html",
  "ko/README.html",
];
const WIDTHS = [1400, 390];
const SCHEMES = ["light", "dark"];
// The milliseconds after which the picture of a failure is whole.
const ANIMATION = 10000;

// Return the elements that reach beyond the window, unless one around them scrolls. It runs in the
// page.
function findDefects() {
  const isShown = (element) =>
    element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const describe = (element) => `${element.tagName.toLowerCase()} ${element.outerHTML.slice(0, 120)}`;
  const defects = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    for (const element of document.querySelectorAll("article *")) {
      const box = element.getBoundingClientRect();
      let scrolls = false;
      for (let each = element; each; each = each.parentElement) {
        scrolls ||= ["auto", "scroll", "hidden"].includes(getComputedStyle(each).overflowX);
      }
      if (isShown(element) && box.right > width + 1 && !scrolls) {
        defects.push(`wider than the window: ${describe(element)}`);
      }
    }
    defects.push("the page scrolls sideways");
  }
  return defects;
}

const [site, pictures] = process.argv.slice(2);
if (!site || !fs.existsSync(path.join(site, "index.html"))) {
  console.error("usage: node tools/check_pages.mjs build/site [PICTURES], after `make docs`");
  process.exit(2);
}
const require = createRequire(path.resolve("build/npm/package.json"));
const { chromium } = require("playwright-core");
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
});
let count = 0;
for (const scheme of SCHEMES) {
  for (const width of WIDTHS) {
    const context = await browser.newContext({
      viewport: { width, height: 900 },
      colorScheme: scheme,
      hasTouch: width < 500,
    });
    const page = await context.newPage();
    for (const name of PAGES) {
      await page.goto(`file://${path.resolve(site, name)}`);
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() =>
        globalThis.axe.run(document, {
          runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"],
        }),
      );
      const defects = await page.evaluate(findDefects);
      for (const { id, help, nodes } of violations) {
        for (const node of nodes) defects.push(`${id}: ${help}: ${node.html.slice(0, 160)}`);
      }
      for (const defect of defects) console.log(`${name} (${width} px, ${scheme}): ${defect}`);
      count += defects.length;
      if (pictures) {
        const file = `${name.replace(".html", "").replaceAll("/", "_")}-${width}-${scheme}.png`;
        await page.screenshot({ path: path.join(pictures, file), fullPage: true });
      }
    }
    await context.close();
  }
}
if (pictures) {
  const page = await browser.newPage({ viewport: { width: 1520, height: 700 } });
  await page.goto(`file://${path.resolve(site, "index.html")}`);
  await page.addStyleTag({
    content: ".headerlink, .theme-toggle, .translation { display: none !important }",
  });
  await page.waitForTimeout(ANIMATION);
  const { x } = await page.locator("article").boundingBox();
  await page.screenshot({
    path: path.join(pictures, "preview.png"),
    clip: { x: x - 48, y: 0, width: 1200, height: 630 },
  });
}
await browser.close();
console.log(`${PAGES.length} pages, ${count} findings`);
process.exit(count ? 1 : 0);
