// The tree on the desk: the Explorer's figure, its selection and its keys, with pruning and adding in the place of
// verdicts, and growth node by node.

import { h, icon } from './dom.js';
import { Plot, treeMarks } from './plots.js';
import { Selection } from './selection.js';
import { nodeAction } from './tuner_edit.js';

const GROW_MS = 450;
const SETTLE_MS = 150;

export function createTree(page) {
  const { t, options, explorer } = page;
  const title = h('h2', {}, t('tuner.tree'));
  const button = (name, press) => h('button', { id: `tree-${name}`, title: t(`tuner.${name}_hint`), onclick: press }, t(`tuner.${name}`));
  const undo = h('button', { id: 'tree-undo', onclick: () => page.act('undo') }, t('tuner.undo'));
  const redo = h('button', { id: 'tree-redo', onclick: () => page.act('redo') }, t('tuner.redo'));
  const edit = button('edit', () => page.act('show', { editing: !state.editing }));
  const cutting = button('cutting', () => page.act('show', { cutting: !state.cutting }));
  const host = h('div', { class: 'mv-plot' });
  const nothing = h('p', { class: 'mv-empty', hidden: true }, t('tuner.no_dynamic'));
  const box = h('div', { class: 'mv-tree mv-tuner-tree', id: 'tuner-tree', tabindex: 0, role: 'application',
    'aria-label': t('tuner.tree_figure'), 'aria-describedby': 'tuner-told' }, host, nothing);
  const told = h('p', { class: 'mv-sentence', id: 'tuner-told', 'aria-live': 'polite' });
  const growth = createGrowth(page);
  const state = { editing: false, cutting: false, part: null };
  const selection = new Selection(box);
  const plot = new Plot(host, {
    name: 'tuner-tree', palette: options.palette.dark, still: true,
    onClick: ({ customdata: target }) => press(target),
    onHover: (point, mouse) => {
      const row = point?.customdata;
      selection.hover(Number.isInteger(row) ? row : null);
      explorer.tip.show(mouse, Number.isInteger(row) ? [state.part?.told[row] ?? ''] : []);
    },
  });
  plot.setTheme(page.dark());
  box.addEventListener('mv:select', (event) => {
    event.stopPropagation();
    describe();
  });

  function press(target) {
    box.focus({ preventScroll: true });
    if (String(target).startsWith('fold:')) {
      const node = selection.nodes.get(Number(target.slice(5)));
      if (node) page.act('open', { path: node.path });
    } else if (Number.isInteger(target)) {
      selection.select(target);
      if (state.editing) act('Enter');
    }
  }

  function act(key) {
    const asked = nodeAction(selection.node, key);
    explorer.tip.hide();
    if (asked) page.act(...asked);
    return Boolean(asked);
  }

  box.addEventListener('keydown', (event) => {
    if (event.ctrlKey && ['z', 'y'].includes(event.key)) page.act(event.key === 'z' ? 'undo' : 'redo');
    else if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if (event.key === 'Escape') page.act('fold');
    else if (!act(event.key) && !selection.move(event.key)) return;
    event.preventDefault();
  });

  const at = (node) => (node.x === null || node.x === undefined ? null : [node.x, node.y]);
  const marks = () => treeMarks(selection, plot.ink, at);

  function describe() {
    plot.mark(marks());
    told.textContent = state.part?.told[selection.shown.row] ?? '';
  }

  reportRoom(page, host);
  return {
    names: ['tree'],
    element: h('section', { class: 'mv-panel mv-tuner-tree-panel', 'aria-label': t('tuner.tree') },
      h('div', { class: 'mv-panel-head' }, title, h('span', { class: 'mv-tree-tools' }, edit, cutting, undo, redo)), box, growth.element, told),
    take(_, part, key) {
      state.part = part;
      selection.bind(part.nodes);
      Object.assign(box.dataset, { nodes: part.count, grown: part.grown, drawn: part.nodes.length, folded: part.folded });
      host.style.visibility = part.figure ? 'visible' : 'hidden';
      nothing.hidden = part.figure !== null;
      growth.take(part);
      plot.marks = marks();
      if (part.figure) plot.draw(part.figure.data, part.figure.layout, key);
      describe();
    },
    draw({ controls, chosen }) {
      Object.assign(state, { editing: controls.editing, cutting: controls.cutting });
      title.textContent = chosen.title;
      title.title = chosen.fingerprint;
      box.dataset.path = selection.path;
      edit.setAttribute('aria-pressed', String(controls.editing));
      cutting.setAttribute('aria-pressed', String(controls.cutting));
      edit.disabled = cutting.disabled = chosen.dynamic;
      undo.disabled = !controls.can_undo;
      redo.disabled = !controls.can_redo;
    },
    pause: growth.pause,
    theme(dark) {
      plot.setTheme(dark);
      describe();
    },
  };
}

// A slider over the nodes in the order in which best-first growth adds them, and Play.
function createGrowth(page) {
  const { t } = page;
  const range = h('input', { type: 'range', id: 'tuner-growth', min: 0, step: 1, 'aria-label': t('tuner.growth') });
  const text = h('span', { class: 'mv-growth-text' });
  const play = h('button', { id: 'tuner-play', class: 'mv-tool', onclick: () => (timer ? pause() : start()) });
  let timer = null;
  let part = { count: 0, grown: 0, growth: '' };

  function label() {
    play.replaceChildren(icon(timer ? 'pause' : 'play'));
    play.setAttribute('aria-label', t(timer ? 'tuner.pause' : 'tuner.play'));
    play.title = t(timer ? 'tuner.pause' : 'tuner.play');
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    label();
  }

  function start() {
    let next = part.grown < part.count ? part.grown : 0;
    timer = setInterval(() => {
      if (page.link.running) return;
      next += 1;
      if (next > part.count) pause();
      else page.act('show', { grown: next });
    }, GROW_MS);
    label();
    page.act('show', { grown: next });
  }

  range.addEventListener('input', () => {
    pause();
    page.act('show', { grown: range.valueAsNumber });
  });
  label();
  return {
    element: h('div', { class: 'mv-growth' }, play, range, text), pause,
    take(shown) {
      if (shown.count !== part.count) pause();
      part = shown;
      range.max = Math.max(part.count, 1);
      range.disabled = play.disabled = !part.editable || part.count === 0;
      if (!page.link.queue.length) range.value = part.grown;
      text.textContent = part.growth;
      text.title = part.growth;
    },
  };
}

// The server draws for the room there is, once that stands still.
function reportRoom(page, host) {
  let timer = null;
  let told = '';
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const { clientWidth: width, clientHeight: height } = host;
      if (!width || !height || told === `${width}×${height}`) return;
      told = `${width}×${height}`;
      page.act('room', { width, height });
    }, SETTLE_MS);
  }).observe(host);
}
