// Verdict, heads, cache strip and merits: plain elements, so that they can be read, clicked and focused.

import { h, replaceTail, symbol } from './dom.js';

const CELL_LIMIT = 128;

// The backbone's ten likeliest tokens at the shown node's parent, as lollipops over log p.
export function createVerdict(app) {
  const { parts, t } = app;
  parts.verdict.addEventListener('click', (event) => {
    const line = event.target.closest('[data-row]');
    if (line) app.selection.select(Number(line.dataset.row));
  });
  const draw = () => {
    const { view, selection } = app;
    const node = selection.shown;
    const parent = node.parent < 0 ? node.row : node.parent;
    const verdict = app.phase > 1 ? view.verdict.rows[String(parent)] : null;
    parts.verdict.dataset.parent = parent;
    if (!verdict) {
      parts.verdict.replaceChildren(h('p', { class: 'mv-empty' }, t(app.phase > 1 ? 'ui.verdict_none' : 'ui.verdict_later')));
      return;
    }
    parts.verdict.replaceChildren(
      h('p', { class: 'mv-verdict-head' }, h('span', {}, verdict.title), h('span', { class: 'mv-terms' }, verdict.terms)),
      lollipops(app, verdict, node));
  };
  return { draw, select: draw, phase: draw };
}

function lollipops(app, verdict, node) {
  const lines = verdict.tokens.map((entry) => {
    const drafted = entry.drafted_row !== null;
    return h('div', { class: 'mv-lollipop', 'data-row': entry.drafted_row, 'data-verdict': entry.verdict,
      'data-selected': drafted && entry.drafted_row === node.row, title: drafted ? app.view.rows[entry.drafted_row]?.sentence : null },
    token(entry.text),
    h('span', { class: 'mv-track' }, h('i', { style: `--at:${100 * entry.at}%`, 'data-drafted': drafted })),
    drafted ? symbol(entry.verdict) : h('span'),
    h('span', { class: 'mv-number' }, entry.p_text));
  });
  if (verdict.threshold_at !== null) lines.push(h('div', { class: 'mv-threshold', style: `--share:${verdict.threshold_at}` }));
  const ticks = verdict.ticks.map((tick) => h('i', { style: `--at:${100 * tick.at}%` }, tick.text));
  return h('div', { class: 'mv-lollipops' }, ...lines, h('div', { class: 'mv-ticks', 'aria-hidden': 'true' }, ...ticks));
}

const token = (text) => h('code', { class: 'mv-token', lang: 'und' }, text);

export function probability(p) {
  if (p === null || p === undefined) return '';
  return p < 0.001 ? '<0.001' : p.toFixed(3);
}

// Every head's ten likeliest tokens; one cell stands for all nodes of that head and rank.
export function createHeads(app) {
  const { parts } = app;
  const nodesOf = (cell) => app.selection.same({ depth: Number(cell.dataset.head), rank: Number(cell.dataset.rank) });
  parts.table.addEventListener('click', (event) => {
    const cell = event.target.closest('[data-rank]');
    const node = cell && choose(app, nodesOf(cell));
    if (node) app.selection.select(node.row);
  });
  parts.table.addEventListener('mouseover', (event) => {
    const cell = event.target.closest('[data-rank]');
    app.selection.hover(cell ? choose(app, nodesOf(cell))?.row ?? null : null);
  });
  parts.table.addEventListener('mouseleave', () => app.selection.hover(null));
  return {
    draw(view) {
      const keys = view.heads.head.map((head) => JSON.stringify(head));
      replaceTail(parts.table, keys, (index) => headColumn(view.heads.head[index]));
    },
    select() {
      const path = app.selection.ancestors(app.selection.shown.row).map((row) => app.selection.nodes.get(row));
      for (const cell of parts.table.querySelectorAll('[data-rank]')) {
        const on = path.some((node) => node.depth === Number(cell.dataset.head) && node.rank === Number(cell.dataset.rank));
        const own = app.selection.shown.depth === Number(cell.dataset.head) && app.selection.shown.rank === Number(cell.dataset.rank);
        cell.toggleAttribute('data-on-path', on);
        cell.toggleAttribute('data-selected', own && on);
      }
    },
  };
}

// Of several nodes with the same head and rank: one below or on the selected path, else the first.
function choose(app, nodes) {
  const own = app.selection.ancestors(app.selection.row);
  return nodes.find((node) => own.includes(node.row) || own.includes(node.parent)) ?? nodes[0];
}

function headColumn(head) {
  return h('div', { class: 'mv-head', 'data-source': head.k },
    h('h3', {}, head.title),
    ...head.tokens.map((entry, rank) => h('div', { class: 'mv-head-cell', 'data-head': head.k, 'data-rank': rank, 'data-used': entry.used,
      style: `--p:${(100 * entry.p).toFixed(1)}%` },
    token(entry.text), h('span', { class: 'mv-number' }, probability(entry.p)))));
}

// One cell per verified row; at phase 4 the kept ones slide together and the rest fades.
export function createCache(app) {
  const { parts, t } = app;
  parts.cacheCells.addEventListener('click', (event) => {
    const cell = event.target.closest('[data-row]');
    if (cell) app.selection.select(Number(cell.dataset.row));
  });
  parts.cacheCells.addEventListener('mouseover', (event) =>
    app.selection.hover(event.target.dataset.row === undefined ? null : Number(event.target.dataset.row)));
  parts.cacheCells.addEventListener('mouseleave', () => app.selection.hover(null));
  return {
    draw(view) {
      const { cache } = view;
      const shown = cache.rows.length > CELL_LIMIT ? cache.rows.filter((cell) => cell.verdict_kept) : cache.rows;
      const keys = [`prefix ${cache.prefix}`, ...shown.map((cell) => `${view.steps.index} ${cell.row} ${cell.verdict_kept}`)];
      parts.cacheCells.style.setProperty('--cells', Math.max(shown.length, 12));
      let kept = 0;
      const slots = shown.map((cell) => (cell.verdict_kept ? kept++ : null));
      const last = slots.lastIndexOf(kept - 1);
      replaceTail(parts.cacheCells, keys, (index) => (index === 0
        ? h('span', { class: 'mv-prefix', title: t('ui.cache_prefix', { n: cache.prefix }) }, String(cache.prefix))
        : h('i', { 'data-row': shown[index - 1].row, 'data-kept': shown[index - 1].verdict_kept,
          'data-last': index - 1 === last, style: `--slide:${(slots[index - 1] ?? index - 1) - (index - 1)}` })));
      parts.cacheText.textContent = cache.text;
      this.select();
    },
    select() {
      const { row, preview } = app.selection;
      for (const cell of parts.cacheCells.querySelectorAll('i')) {
        cell.toggleAttribute('data-selected', Number(cell.dataset.row) === row);
        cell.toggleAttribute('data-hovered', Number(cell.dataset.row) === preview);
      }
    },
  };
}

export function createMerits(app) {
  const { parts } = app;
  return {
    draw(view) {
      const tiles = view.merits.map((merit) => h('div', { class: 'mv-merit', 'data-key': merit.key, title: merit.hint ?? null },
        h('span', { class: 'mv-merit-label' }, merit.label),
        h('strong', {}, merit.value),
        merit.bars?.length ? bars(merit.bars) : null));
      const { equality } = view;
      tiles.push(h('div', { class: 'mv-merit mv-equality', 'data-key': 'equality', 'data-state': equality.state },
        h('span', { class: 'mv-merit-label' }, app.t('ui.equality')), h('span', { class: 'mv-equality-text' }, equality.text)));
      parts.merits.replaceChildren(...tiles);
    },
  };
}

function bars(values) {
  const numbers = values.map((value) => (typeof value === 'number' ? value : value.value ?? 0));
  const most = Math.max(...numbers, 1e-9);
  return h('span', { class: 'mv-bars', 'aria-hidden': 'true' },
    ...numbers.map((value) => h('i', { style: `height:${Math.max(4, 100 * value / most).toFixed(0)}%` })));
}
