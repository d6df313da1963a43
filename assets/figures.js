// Tree and mask: Plotly figures that share the selection.

import { h } from './dom.js';
import { dressedAsA } from './compare.js';
import { causalCrosses, differenceMarks, maskMarks, Plot, treeMarks } from './plots.js';
import { cellLines, nodeLines } from './tooltip.js';

const PATH_KNOWN = 3;
const LENS = 3;
const CAUSAL_UP_TO = 65;
const LABEL = { left: -16, right: 110, high: 12 }; // pixels round a marker within which its words lie
const ONE_CLICK_MS = 300;

// The later phases come as changes of the phase before; each trace is made whole again.
export function unpacked(view) {
  const { data } = view.tree;
  for (let phase = 1; phase < data.length; phase += 1) {
    data[phase] = data[phase].map((changes, at) => ({ ...data[phase - 1][at], ...changes }));
  }
  return view;
}

export function createTree(app) {
  const { parts, selection, options: { palette } } = app;
  let answered = -Infinity;
  const plot = new Plot(parts.treePlot, {
    name: 'tree', palette: palette.dark,
    onClick: ({ customdata: target }) => {
      answered = performance.now();
      if (Number.isInteger(target)) selection.select(target);
      else if (String(target).startsWith('fold:')) app.act('open', { path: selection.nodes.get(Number(target.slice(5))).path });
      parts.outline.focus({ preventScroll: true });
    },
    onHover: (point, mouse) => {
      const target = point?.customdata;
      selection.hover(Number.isInteger(target) ? target : null);
      app.tip.show(mouse, target === undefined ? [] : hoverLines(app, target));
    },
  });
  // Plotly reports clicks on markers alone; most people click the word beside one.
  parts.treePlot.addEventListener('click', (event) => {
    if (performance.now() - answered < ONE_CLICK_MS) return;
    const row = rowBeside(plot, selection, event);
    if (row !== null) selection.select(row);
  });
  const at = (node) => (node.x === null || node.x === undefined ? null : [node.x, node.y]);
  const marks = () => {
    const differing = app.phase > 1 && app.view?.pin ? app.view.pin.differs : [];
    const { color } = palette.verdicts.ghost;
    return [...treeMarks(selection, plot.ink, at),
      ...differenceMarks(selection, differing, plot.dark ? palette.dark[color] : color, at)];
  };
  return {
    plot,
    draw(phase) {
      const { tree, pin } = app.view;
      plot.marks = marks();
      const traces = app.showingA ? dressedAsA(tree.data[0], pin, selection.nodes, palette.verdicts) : tree.data[phase - 1];
      return plot.draw(traces, tree.figure.layout);
    },
    select: () => plot.mark(marks()),
  };
}

// The node whose marker or words lie under the mouse; null where none does.
function rowBeside(plot, selection, { clientX, clientY }) {
  const box = plot.host.getBoundingClientRect();
  let found = null;
  let nearest = LABEL.right;
  for (const { row, x, y } of selection.nodes.values()) {
    const place = x === null ? null : plot.pixel(x, y);
    const right = place && clientX - box.left - place.left;
    if (!place || right < LABEL.left || right > nearest || Math.abs(clientY - box.top - place.top) > LABEL.high) continue;
    nearest = right;
    found = row;
  }
  return found;
}

function hoverLines(app, target) {
  if (Number.isInteger(target)) return nodeLines(app, target);
  if (target === 'ghost') return [app.view.tree.ghost.reason];
  return [app.t('ui.folded_below', { n: hiddenBelow(app, Number(target.slice(5))) })];
}

// Nodes below a row that the fold leaves out.
function hiddenBelow({ selection }, row) {
  let hidden = 0;
  const visit = (node) => {
    for (const child of selection.children.get(node)) {
      if (child.x === null) hidden += 1;
      visit(child.row);
    }
  };
  for (const child of selection.children.get(row)) {
    if (child.x !== null) continue;
    hidden += 1;
    visit(child.row);
  }
  return hidden;
}

export function createMask(app) {
  const { parts, selection, options, t } = app;
  const onCell = (point) => point && point.data.name !== 'prefix' && selection.nodes.has(point.y);
  const plot = new Plot(parts.maskPlot, {
    name: 'mask', palette: options.palette.dark,
    onClick: (point) => {
      selection.select(point.y);
      parts.mask.focus({ preventScroll: true });
    },
    onHover: (point, mouse) => {
      selection.hover(onCell(point) ? point.y : null);
      if (!point) app.tip.hide();
      else if (onCell(point)) app.tip.show(mouse, cellLines(app, point.y, point.x));
      else app.tip.show(mouse, [t('ui.mask_prefix', { n: app.view.cache.prefix })]);
    },
  });
  const marks = () => maskMarks(selection, plot.ink, app.view.cache.rows, (row) => row);
  const mask = {
    plot,
    draw(view) {
      const rows = view.cache.rows;
      parts.causal.disabled = rows === 0 || rows > CAUSAL_UP_TO;
      parts.causalLabel.title = rows > CAUSAL_UP_TO ? t('ui.causal_many', { n: rows - 1 }) : t('ui.causal_hint');
      const causal = parts.causal.checked && !parts.causal.disabled;
      const kept = app.phase >= PATH_KNOWN;
      const { data, layout } = view.mask.figure;
      const shown = kept ? data : data.filter((trace) => trace.name !== 'kept');
      plot.marks = marks();
      plot.draw(causal ? [...shown, causalCrosses(selection)] : shown, layout, `${view.mask.key} ${kept} ${causal}`);
      drawLens(app);
    },
    phase: () => mask.draw(app.view),
    select() {
      plot.mark(marks());
      drawLens(app);
    },
  };
  parts.causal.addEventListener('change', () => mask.draw(app.view));
  return mask;
}

// In the overview a row is thinner than a pixel: the rows round the selected one are spelt out in the corner that no
// mask ever fills, since a row sees no later row.
function drawLens({ view, selection, parts, t }) {
  parts.lens.hidden = view.mask.kind !== 'overview';
  if (parts.lens.hidden) return;
  const first = Math.max(0, Math.min(selection.shown.row - LENS, selection.nodes.size - 1 - 2 * LENS));
  parts.lens.replaceChildren(...Array.from({ length: 2 * LENS + 1 }, (_, at) => selection.nodes.get(first + at))
    .map(({ row, text }) => h('p', { 'data-selected': row === selection.row },
      t('ui.lens', { row: String(row), text, rows: selection.ancestors(row).join(' ') }))));
}
