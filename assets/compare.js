// Pin and compare: the step pinned as A beside the step on screen, B, where both stand on the same prefix.

import { h } from './dom.js';

export function createCompare(app) {
  const { parts, t } = app;
  parts.pin = h('button', { id: 'pin', title: t('ui.pin_hint'), onclick: () => togglePin(app) });
  parts.showA = h('button', { id: 'show-a', title: t('ui.show_a_hint'), 'aria-pressed': 'false',
    onclick: () => showA(app, !app.showingA) }, t('ui.show_a'));
  parts.pinNote = h('p', { class: 'mv-pin-note', 'aria-live': 'polite' });
  parts.knobs.firstElementChild.after(h('div', { class: 'mv-pin' }, parts.pin, parts.showA, parts.pinNote));
  return {
    draw({ pin, steps }) {
      parts.pin.textContent = t(pin ? 'ui.unpin' : 'ui.pin');
      parts.pin.setAttribute('aria-pressed', String(pin !== null));
      parts.pin.disabled = steps.count === 0;
      parts.showA.disabled = !pin?.here;
      if (!pin?.here) showA(app, false);
      parts.pinNote.textContent = pin?.note ?? '';
      parts.pinNote.hidden = !pin?.note;
    },
  };
}

export function togglePin(app) {
  if (app.view.pin) app.act('unpin');
  else if (app.view.steps.count) app.act('pin');
}

// A's verdicts in B's tree, as long as a key is held or until the button is pressed again.
export function showA(app, on) {
  const shown = on && Boolean(app.view?.pin?.here);
  if (shown === Boolean(app.showingA)) return;
  app.showingA = shown;
  app.parts.showA.setAttribute('aria-pressed', String(shown));
  app.root.toggleAttribute('data-showing-a', shown);
  app.motion.skip();
  app.tree.draw(app.phase);
}

// The first phase's traces hold no verdict; their markers take those that A gave the same paths.
export function dressedAsA(traces, { verdicts }, nodes, marks) {
  return traces.map((trace) => {
    if (trace.name !== 'nodes') return trace;
    const own = trace.customdata.map((row) => (Number.isInteger(row) ? verdicts[nodes.get(row).path] : undefined));
    const mark = (at) => marks[trace.customdata[at] === 0 ? 'root' : own[at]];
    const shrink = trace.marker.size[0] / marks.root.size;
    const pick = (old, take) => old.map((value, at) => (mark(at) ? take(mark(at)) : value));
    const { marker } = trace;
    return { ...trace, marker: { ...marker, symbol: pick(marker.symbol, ({ symbol }) => symbol),
      color: pick(marker.color, ({ color }) => color), size: pick(marker.size, ({ size }) => size * shrink),
      opacity: own.map((verdict, at) => (verdict || !Number.isInteger(trace.customdata[at]) ? 1 : 0.3)),
      line: { color: pick(marker.line.color, ({ color }) => color),
        width: pick(marker.line.width, ({ symbol }) => (symbol.endsWith('-open') ? 2 : 0)) } } };
  });
}

// Tiles A | B | Δ; while something is pinned here they stand where the merits of the run stood.
export function compareTiles({ pin }, t) {
  const value = (name, text) => h('span', {}, h('b', {}, t(`ui.compare_${name}`)), ` ${text} `);
  const differs = pin.differs.length;
  const head = h('div', { class: 'mv-merit mv-compare-head', 'data-key': 'pin' },
    h('span', { class: 'mv-merit-label' }, t('ui.compare')), h('span', { class: 'mv-compare-label' }, pin.label),
    h('span', { class: 'mv-merit-note' }, t(differs ? 'ui.compare_differs' : 'ui.compare_same', { n: differs })));
  return [head, ...pin.rows.map((row) => h('div', { class: 'mv-merit mv-compare', 'data-key': `pin-${row.key}` },
    h('span', { class: 'mv-merit-label' }, row.label),
    h('span', { class: 'mv-ab' }, value('a', row.a), value('b', row.b), value('delta', row.delta))))];
}
