// The knobs: a slider and a number box each, live, answered one at a time with the last value winning.

import { h, icon, milliseconds } from './dom.js';

const REWEIGH = ['temperature', 'epsilon', 'delta', 'top_p'];
const MODES = ['greedy', 'typical', 'rejection'];
const IDS = { temperature: 'temperature', epsilon: 'epsilon', delta: 'delta', top_p: 'top-p' };

export function createKnobs(app) {
  const { parts, t } = app;
  const state = { topS: [] };
  const move = (values) => {
    app.stop();
    return app.act('knob', values);
  };
  const presets = h('select', { id: 'presets', 'aria-label': t('ui.presets') });
  presets.addEventListener('change', () => {
    if (presets.value) app.act('preset', { name: presets.value });
    presets.value = '';
  });
  const topS = h('div', { class: 'mv-top-s', role: 'group', 'aria-label': t('ui.top_s') });
  const size = sizeKnob(t, (value) => move({ size: value }));
  const readout = h('p', { class: 'mv-readout', 'aria-live': 'polite' });
  const mode = modeKnob(t, (value) => move({ mode: value }));
  const reweigh = Object.fromEntries(REWEIGH.map((name) =>
    [name, knob(IDS[name], t(`ui.${name}`), t(`ui.${name}_hint`), (value) => move({ [name]: value }))]));
  const lock = lockButton(t, () => move(app.view.knobs.delta_locked
    ? { delta_locked: false } : { delta_locked: true, epsilon: reweigh.epsilon.value }));
  reweigh.delta.element.append(lock);
  const reason = h('p', { class: 'mv-reason' });
  const badge = h('p', { id: 'badge', class: 'mv-badge' });
  parts.knobs.append(presets, topS, size.element, readout, mode.element,
    ...REWEIGH.map((name) => reweigh[name].element), reason, badge);

  return {
    draw(view) {
      const { knobs } = view;
      fillPresets(presets, knobs.presets, t);
      matchHeads(topS, state, knobs, t, move);
      if (!app.link.queue.length) {
        knobs.top_s.forEach((value, index) => state.topS[index].set(value));
        size.set(knobs.size, knobs.detents);
        mode.set(knobs.mode);
        for (const name of REWEIGH) reweigh[name].set(knobs[name]);
      }
      for (const name of REWEIGH) {
        reweigh[name].bound(knobs.bounds[name]);
        reweigh[name].disable(knobs.disabled[name]);
      }
      mode.disable(knobs.disabled.mode);
      size.disable(knobs.disabled.size);
      state.topS.forEach((wall) => wall.disable(knobs.disabled.top_s));
      showLock(lock, knobs);
      readout.textContent = knobs.readout;
      parts.treeTitle.textContent = knobs.tree;
      reason.textContent = [...new Set(Object.values(knobs.disabled))].join(' ');
    },
    // How the move was answered, and how long from the hand to the screen.
    measured(view, ms) {
      const { text, kind } = view.knobs.badge;
      badge.dataset.kind = kind;
      badge.textContent = text && ms !== null ? t('ui.badge', { answer: text, ms: milliseconds(ms) }) : text;
    },
  };
}

// δ follows √ε, the paper's choice, until it is moved by itself; the session keeps the two together.
function lockButton(t, toggle) {
  return h('button', { class: 'mv-lock', 'aria-label': t('ui.delta_lock'), title: t('ui.delta_lock'), onclick: toggle });
}

function showLock(lock, { delta_locked: locked, disabled }) {
  lock.replaceChildren(icon(locked ? 'locked' : 'unlocked'));
  lock.setAttribute('aria-pressed', String(locked));
  lock.disabled = 'delta' in disabled;
}

// One slider for each head of the model.
function matchHeads(group, state, knobs, t, move) {
  if (state.topS.length === knobs.heads) return;
  state.topS = Array.from({ length: knobs.heads }, (_, index) => knob(`top-s-${index + 1}`,
    t('ui.top_s_label', { k: index + 1 }), t('ui.top_s_hint', { k: index + 1, next: index + 2 }),
    () => move({ top_s: state.topS.map((wall) => wall.value) })));
  for (const wall of state.topS) wall.bound([0, knobs.max_rank, 1]);
  group.replaceChildren(...state.topS.map((wall) => wall.element));
}

function fillPresets(select, presets, t) {
  const key = presets.map((preset) => preset.label).join('|');
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  select.replaceChildren(new Option(t('ui.presets'), ''), ...presets.map((preset) => new Option(preset.label, preset.name)));
}

// Slider and number box that always agree. `changed(value)` hears every valid value, from hand, key or box.
function knob(id, label, hint, changed) {
  const range = h('input', { type: 'range', 'aria-label': hint });
  const box = h('input', { type: 'number', 'aria-label': hint, inputmode: 'decimal' });
  const name = h('span', { class: 'mv-knob-label', 'aria-hidden': 'true' }, label);
  const element = h('div', { id, class: 'mv-knob', title: hint }, name, range, box);
  const own = { element, range, box, value: 0 };
  own.paint = () => {};
  const take = (source, other) => {
    const value = source.valueAsNumber;
    if (Number.isNaN(value) || value < Number(source.min) || value > Number(source.max)) return;
    own.value = value;
    other.value = source.value;
    own.paint();
    changed(value);
  };
  range.addEventListener('input', () => take(range, box));
  box.addEventListener('input', () => take(box, range));
  box.addEventListener('change', () => { box.value = own.value; });
  own.set = (value) => {
    const focused = document.activeElement === box;
    const typing = focused && box.valueAsNumber !== own.value; // what stands in the box is no value yet
    own.value = value;
    range.value = value;
    if (!typing && !(focused && box.valueAsNumber === value)) box.value = value;
    own.paint();
  };
  own.bound = ([low, high, step]) => {
    for (const input of [range, box]) Object.assign(input, { min: low, max: high, step });
    own.set(own.value);
  };
  own.disable = (why) => {
    range.disabled = box.disabled = Boolean(why);
    element.title = why ?? hint;
  };
  return own;
}

// Size spans 0 to thousands: the slider's value is the size itself, but hand and arrow keys move over the detents.
export function sizeKnob(t, changed, id = 'tree-size', key = 'ui.size') {
  const own = knob(id, t(key), t(`${key}_hint`), changed);
  const { range } = own;
  own.element.classList.add('mv-detents');
  let detents = [0, 1];
  const nearest = () => detents.reduce((best, value, index) =>
    (Math.abs(value - own.value) < Math.abs(detents[best] - own.value) ? index : best), 0);
  const place = (value) => {
    const above = detents.findIndex((detent) => detent >= value);
    if (above <= 0) return above < 0 ? 1 : 0;
    const part = (value - detents[above - 1]) / (detents[above] - detents[above - 1]);
    return (above - 1 + part) / (detents.length - 1);
  };
  const thumb = own.element.insertBefore(h('i', { class: 'mv-thumb' }), own.box);
  own.paint = () => thumb.style.setProperty('--fill', place(own.value));
  const go = (index) => {
    const value = detents[Math.min(detents.length - 1, Math.max(0, index))];
    if (value === own.value) return;
    range.value = value;
    range.dispatchEvent(new Event('input'));
  };
  range.addEventListener('pointerdown', (event) => {
    if (range.disabled) return;
    event.preventDefault();
    range.focus();
    range.setPointerCapture(event.pointerId);
    const follow = (moved) => {
      const { left, width } = range.getBoundingClientRect();
      go(Math.round((detents.length - 1) * (moved.clientX - left) / width));
    };
    follow(event);
    range.addEventListener('pointermove', follow);
    range.addEventListener('lostpointercapture', () => range.removeEventListener('pointermove', follow), { once: true });
  });
  const keys = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -3, PageUp: 3, Home: -99, End: 99 };
  range.addEventListener('keydown', (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    go(nearest() + keys[event.key]);
  });
  const set = own.set;
  own.set = (value, steps = detents) => {
    detents = steps;
    for (const input of [range, own.box]) Object.assign(input, { min: 0, max: Math.max(value, detents.at(-1)), step: 1 });
    set(value);
  };
  return own;
}

function modeKnob(t, changed) {
  const inputs = MODES.map((name) => h('input', { type: 'radio', name: 'accept-mode', value: name,
    onchange: () => changed(name) }));
  const element = h('div', { id: 'accept-mode', class: 'mv-modes', role: 'radiogroup', 'aria-label': t('ui.mode') },
    ...inputs.map((input, index) => h('label', { title: t(`ui.mode_${MODES[index]}_hint`) }, input,
      h('span', {}, t(`ui.mode_${MODES[index]}`)))));
  return {
    element,
    set: (mode) => inputs.forEach((input) => { input.checked = input.value === mode; }),
    disable: (why) => inputs.forEach((input) => { input.disabled = Boolean(why); }),
  };
}
