// The tree as an outline: what a phone shows and what a screen reader reads at every size.

import { h, symbol } from './dom.js';
import { probability } from './panels.js';

const FOLD_PHONE = 40;
const FOLD = 64;
const MOST = 600;

export function createOutline(app) {
  const { parts } = app;
  const { outline } = parts;
  let open = false;
  outline.addEventListener('click', (event) => {
    const item = event.target.closest('[data-row]');
    if (item) app.selection.select(Number(item.dataset.row));
    if (event.target.closest('.mv-folded')) {
      open = true;
      draw();
      outline.focus({ preventScroll: true });
    }
  });
  outline.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || !open) return;
    open = false;
    draw();
  });

  function draw() {
    const rows = visibleRows(app, open ? MOST : app.screen.phone ? FOLD_PHONE : FOLD);
    const folded = app.selection.nodes.size - rows.size;
    const items = inOrder(app.selection).filter((node) => rows.has(node.row)).map((node) => item(app, node));
    if (folded > 0) {
      items.push(h('button', { class: 'mv-folded', role: 'treeitem', 'aria-level': 2, 'aria-expanded': 'false' },
        app.t('ui.folded', { n: folded })));
    }
    outline.replaceChildren(...items);
    select();
  }

  function select() {
    const { row } = app.selection;
    for (const element of outline.querySelectorAll('[data-row]')) {
      element.setAttribute('aria-selected', String(Number(element.dataset.row) === row));
    }
    const own = outline.querySelector('[aria-selected=true]');
    if (!own) return;
    outline.setAttribute('aria-activedescendant', own.id);
    if (outline.contains(document.activeElement) || document.activeElement === outline) own.scrollIntoView({ block: 'nearest' });
  }

  return { draw, select: () => (outline.querySelector(`#outline-${app.selection.row}`) ? select() : draw()), phase: draw };
}

// Accepted and selected rows first, then the likeliest, each with its ancestors, up to the limit.
function visibleRows(app, limit) {
  const { selection } = app;
  const nodes = [...selection.nodes.values()];
  const rows = new Set([0, ...selection.ancestors(selection.row)]);
  const weight = (node) => Number(node.verdict === 'accepted') + (node.p ?? 0);
  const order = nodes.toSorted((a, b) => weight(b) - weight(a));
  for (const node of nodes.length > limit ? order : nodes) {
    if (rows.size >= limit) break;
    for (const row of selection.ancestors(node.row)) rows.add(row);
  }
  return rows;
}

// Depth first, best rank first: the order in which a tree is read.
function inOrder(selection) {
  const order = [];
  const visit = (node) => {
    order.push(node);
    selection.children.get(node.row).forEach(visit);
  };
  visit(selection.nodes.get(0));
  return order;
}

function item(app, node) {
  const { view, selection } = app;
  const known = app.phase > 1;
  const verdict = known || node.row === 0 ? node.verdict : 'unverified';
  const threshold = view.verdict.rows[String(node.parent)]?.threshold;
  const number = node.row === 0 ? app.t('ui.root') : known ? probability(node.p) : '';
  const leaf = selection.children.get(node.row).length === 0;
  return h('div', { role: 'treeitem', id: `outline-${node.row}`, 'data-row': node.row, 'data-path': node.path,
    'aria-level': node.depth + 1, 'aria-expanded': leaf ? null : 'true', 'aria-selected': 'false',
    'aria-label': `${node.text} ${number}, ${known ? view.rows[String(node.row)]?.sentence ?? '' : app.t('ui.unverified')}`,
    style: `--depth:${node.depth}` },
  symbol(node.row === 0 ? 'root' : verdict),
  h('code', { class: 'mv-token', lang: 'und' }, node.text), ' ',
  h('span', { class: 'mv-number' }, number),
  node.row === 0 || !known || node.p === null ? h('span') : h('span', { class: 'mv-p' },
    h('i', { style: `width:${(100 * node.p).toFixed(1)}%` }),
    threshold ? h('b', { style: `left:${(100 * threshold).toFixed(1)}%` }) : null));
}
