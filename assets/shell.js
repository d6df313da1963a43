// Theme, tabs and keys: what belongs to the page as a whole.

import { showA, togglePin } from './compare.js';
import { recall, remember } from './screen.js';

// Where a key means something else already; letters are typed into text alone.
const TAKEN = { ' ': 'input, textarea, select, button, summary', ',': 'input, textarea, select', '.': 'input, textarea, select' };
const THEME_KEY = 'medusa-viz-theme';

// The class `dark` on the body is the one switch; Gradio sets it from the system, the button turns it.
export function installTheme(app) {
  const { body } = document;
  const stored = recall(THEME_KEY);
  if (stored) body.classList.toggle('dark', stored === 'dark');
  const apply = () => {
    const dark = body.classList.contains('dark');
    app.root.dataset.theme = dark ? 'dark' : 'light';
    app.tree.plot.setTheme(dark);
    app.mask.plot.setTheme(dark);
    if (app.view) {
      app.tree.select();
      app.mask.select();
    }
    app.root.dispatchEvent(new CustomEvent('mv:theme', { detail: { dark } }));
  };
  new MutationObserver(apply).observe(body, { attributes: true, attributeFilter: ['class'] });
  app.parts.theme.addEventListener('click', () => {
    body.classList.toggle('dark');
    remember(THEME_KEY, body.classList.contains('dark') ? 'dark' : 'light');
  });
  apply();
}

export function installTabs(app) {
  const { parts } = app;
  const panels = { verdict: parts.verdict, heads: parts.heads, gains: parts.gains };
  const open = (name) => {
    for (const tab of parts.tabs) {
      const own = tab.dataset.tab === name;
      tab.setAttribute('aria-selected', String(own));
      tab.tabIndex = own ? 0 : -1;
      panels[tab.dataset.tab].hidden = !own;
    }
    if (app.view) app.tabPanels.forEach((panel) => panel.draw(app.view));
  };
  for (const tab of parts.tabs) {
    tab.addEventListener('click', () => open(tab.dataset.tab));
    tab.addEventListener('keydown', (event) => {
      if (!['ArrowLeft', 'ArrowRight'].includes(event.key)) return;
      const step = event.key === 'ArrowRight' ? 1 : -1;
      const next = parts.tabs[(parts.tabs.indexOf(tab) + step + parts.tabs.length) % parts.tabs.length];
      open(next.dataset.tab);
      next.focus();
    });
  }
  open('verdict');
  const show = (segment) => {
    parts.main.dataset.segment = segment;
    for (const button of parts.segments) button.setAttribute('aria-pressed', String(button.dataset.segment === segment));
  };
  for (const button of parts.segments) button.addEventListener('click', () => show(button.dataset.segment));
  show('tree');
  parts.drawer.addEventListener('click', () => {
    const on = parts.main.toggleAttribute('data-drawer');
    parts.drawer.setAttribute('aria-expanded', String(on));
  });
  parts.help.addEventListener('click', () => parts.dialog.showModal());
}

// Arrow keys act only with focus in tree, mask or table; Space and the transport keys wherever nothing is typed.
export function installKeys(app) {
  const { parts, root } = app;
  const areas = [[parts.tree, 'tree'], [parts.mask, 'rows'], [parts.cache, 'rows'], [parts.heads, 'tree']];
  for (const [area, mode] of areas) {
    area.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (app.selection.move(event.key, mode)) event.preventDefault();
    });
  }
  parts.tree.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') app.act('fold');
  });
  document.addEventListener('keydown', (event) => {
    app.motion.skip();
    if (root.dataset.page !== 'explorer') return;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || parts.dialog.open) return;
    if (!root.contains(event.target) && event.target !== document.body) return;
    if (event.target.matches?.(TAKEN[event.key] ?? 'textarea, select, input[type="text"]')) return;
    const action = { ' ': () => advance(app), ',': () => press(parts.back), '.': () => press(parts.forward),
      p: () => togglePin(app), P: () => togglePin(app), '\\': () => showA(app, true) }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  document.addEventListener('keyup', (event) => { if (event.key === '\\') showA(app, false); });
  addEventListener('blur', () => showA(app, false));
  root.addEventListener('pointerdown', () => app.motion.skip());
}

function advance(app) {
  if (app.phase < 4) app.setPhase(app.phase + 1);
  else press(app.parts.step);
}

function press(button) {
  if (!button.disabled) button.click();
}
