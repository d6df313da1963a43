// Verdict, heads, cache strip and merits: plain elements, so that they can be read, clicked and focused.

import { compareTiles } from './compare.js';
import { h, replaceTail, symbol } from './dom.js';

const CELL_LIMIT = 128;
const DECADES = 5;

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
      const asked = app.phase > 1 && view.phases[1].ms !== null;
      const why = asked ? 'ui.verdict_none' : 'ui.verdict_later';
      parts.verdict.replaceChildren(h('p', { class: 'mv-empty' }, view.steps.count ? t(why) : ''));
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
      'data-selected': drafted && entry.drafted_row === node.row,
      title: drafted ? app.view.rows[entry.drafted_row]?.sentence : null },
    token(entry.text),
    h('span', { class: 'mv-track' }, h('i', { style: `--at:${place(entry.p)}`, 'data-drafted': drafted })),
    drafted ? symbol(entry.verdict) : h('span'),
    h('span', { class: 'mv-number' }, entry.p_text));
  });
  const ticks = Array.from({ length: DECADES + 1 }, (_, decade) => 10 ** (decade - DECADES)).map((p) =>
    h('i', { style: `--at:${place(p)}` }, String(p)));
  return h('div', { class: 'mv-lollipops' }, h('div', { class: 'mv-field' }, h('div', { class: 'mv-scale' },
    verdict.threshold ? h('div', { class: 'mv-threshold', style: `--at:${place(verdict.threshold)}` }) : null)),
  ...lines, h('div', { class: 'mv-ticks', 'aria-hidden': 'true' }, ...ticks));
}

// Place of a probability on the log axis, the same five decades for every parent, so that nothing shifts.
const place = (p) => `${(p > 0 ? 100 * Math.max(0, 1 + Math.log10(p) / DECADES) : 0).toFixed(1)}%`;

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
      this.select();
    },
    select() {
      const path = app.selection.ancestors(app.selection.shown.row).map((row) => app.selection.nodes.get(row));
      for (const cell of parts.table.querySelectorAll('[data-rank]')) {
        const here = path.find((node) => node.depth === Number(cell.dataset.head) && node.rank === Number(cell.dataset.rank));
        cell.toggleAttribute('data-on-path', here !== undefined);
        cell.toggleAttribute('data-selected', here === app.selection.shown);
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
    h('p', { class: 'mv-head-title' }, head.title),
    ...head.tokens.map((entry, rank) => h('div', { class: 'mv-head-cell',
      'data-head': head.k, 'data-rank': rank, 'data-used': entry.used, style: `--p:${(100 * entry.p).toFixed(1)}%` },
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
      const keeps = new Set(cache.kept);
      const shown = cache.rows > CELL_LIMIT ? cache.kept : Array.from({ length: cache.rows }, (_, row) => row);
      const rest = cache.rows - shown.length;
      const cells = shown.map((row) => `${view.steps.index} ${row} ${keeps.has(row)}`);
      const keys = [`prefix ${cache.prefix}`, ...cells, `rest ${rest}`];
      parts.cacheCells.style.setProperty('--cells', Math.max(shown.length, 12));
      let kept = 0;
      const slots = shown.map((row) => (keeps.has(row) ? kept++ : null));
      const last = slots.lastIndexOf(kept - 1);
      const block = h('span', { class: 'mv-prefix', title: t('ui.cache_prefix', { n: cache.prefix }) }, String(cache.prefix));
      const others = h('span', { class: 'mv-rest', hidden: rest === 0 }, t('ui.cache_rest', { n: rest }));
      const cell = (at) => h('i', { 'data-row': shown[at], 'data-kept': String(keeps.has(shown[at])),
        'data-last': String(at === last), style: `--slide:${(slots[at] ?? at) - at}` });
      replaceTail(parts.cacheCells, keys, (index) => (index === 0 ? block : index > shown.length ? others : cell(index - 1)));
      parts.cacheText.textContent = parts.cacheText.title = cache.text;
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
  const { parts, t } = app;
  const check = h('input', { type: 'checkbox', id: 'check', 'aria-label': t('ui.check'),
    onchange: () => app.act('check', { on: check.checked }) });
  const told = h('span', { class: 'mv-equality-text' });
  const equality = h('label', { class: 'mv-merit mv-equality', 'data-key': 'equality', title: t('ui.check') },
    h('span', { class: 'mv-merit-label' }, check, t('ui.equality')), told);
  const tiles = h('div', { class: 'mv-tiles' });
  parts.merits.replaceChildren(tiles, equality);
  return {
    draw(view) {
      tiles.replaceChildren(...(view.pin?.here ? compareTiles(view, t) : view.merits.map(tile)));
      equality.dataset.state = view.equality.state;
      told.textContent = view.equality.text;
      check.checked = view.equality.on;
      check.disabled = view.run.recorded;
    },
  };
}

function tile(merit) {
  return h('div', { class: 'mv-merit', 'data-key': merit.key, title: `${merit.hint} ${merit.note}` },
    h('span', { class: 'mv-merit-label' }, merit.label),
    merit.key === 'depth' && merit.bars.length ? null : h('strong', {}, merit.value),
    merit.bars.length ? bars(merit.bars, merit.key === 'depth') : null,
    h('span', { class: 'mv-merit-note' }, merit.note));
}

// Shares stand on a scale from 0 to 1 with their numbers; milliseconds are compared with the longest.
function bars(values, shares) {
  const most = shares ? 1 : Math.max(...values.map((bar) => bar.value), 1e-9);
  return h('span', { class: shares ? 'mv-bars mv-shares' : 'mv-bars' }, ...values.map((bar) =>
    h('span', { title: `${bar.label}: ${bar.text}` },
      h('i', { style: `height:${Math.max(6, 100 * bar.value / most).toFixed(0)}%` }),
      shares ? h('small', {}, bar.text) : null)));
}
