// The text strip: prompt box, examples, committed and pending chips, branches; and the step slider below.

import { h, replaceTail } from './dom.js';

const DOT_LIMIT = 160;
const DOT_MAX = 18;

export function createText(app) {
  const { parts, t } = app;
  const prompt = parts.prompt;

  const start = () => {
    app.stop();
    app.act('start', { prompt: prompt.value });
  };
  // Enter sends; while an input method composes, Enter belongs to it.
  prompt.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    if (!parts.start.disabled) start();
  });
  prompt.addEventListener('input', () => markEdited());
  parts.start.addEventListener('click', start);
  const examples = createExamples(app);
  parts.pending.addEventListener('mouseover', (event) => hoverChip(app, event.target));
  parts.pending.addEventListener('mouseleave', () => app.selection.hover(null));
  parts.pending.addEventListener('click', (event) => {
    const chip = event.target.closest('[data-path]');
    if (chip) app.selection.selectPath(chip.dataset.path);
  });
  parts.chips.addEventListener('click', (event) => {
    const chip = event.target.closest('[data-step]');
    if (chip) app.act('goto', { index: Number(chip.dataset.step) });
  });
  parts.slider.addEventListener('input', () => {
    app.stop();
    app.act('goto', { index: parts.slider.valueAsNumber });
  });

  return {
    draw(view) {
      const fresh = app.prompt !== view.text.prompt;
      if (fresh && prompt.value === (app.prompt ?? '')) prompt.value = view.text.prompt; // what was typed since stays
      app.prompt = view.text.prompt;
      parts.start.disabled = !view.run.can.start;
      examples.draw(view.text.beside.measured);
      markEdited();
      drawBranches(app, view); // first: its tabs take room from the chips, which end scrolled to their last line
      drawChips(app, view);
      drawSlider(app, view);
      this.select();
    },
    select() {
      const { path } = app.selection;
      for (const chip of parts.pending.children) {
        chip.toggleAttribute('data-selected', path !== '' && chip.dataset.path === path);
        chip.toggleAttribute('data-hovered', chip.dataset.path === app.selection.shown.path && app.selection.preview !== null);
      }
    },
  };

  function markEdited() {
    const edited = prompt.value !== (app.prompt ?? '');
    parts.promptNote.textContent = edited ? t('ui.prompt_edited') : app.view?.text.beside.note ?? '';
    parts.promptNote.toggleAttribute('data-edited', edited);
  }
}

function hoverChip(app, target) {
  const chip = target.closest('[data-path]');
  app.selection.hover(chip ? app.selection.byPath.get(chip.dataset.path)?.row ?? null : null);
}

// Example prompts; with what was measured on them only while that model runs.
function createExamples(app) {
  const { parts, t, options } = app;
  const list = options.examples.map((example, index) => h('option', { value: index }, example.prompt));
  parts.examples.append(h('option', { value: '' }, t('ui.examples')), ...list);
  parts.examples.addEventListener('change', () => {
    if (parts.examples.value !== '') parts.prompt.value = options.examples[Number(parts.examples.value)].prompt;
    parts.examples.value = '';
    parts.prompt.dispatchEvent(new Event('input'));
    parts.start.focus();
  });
  return {
    draw(measured) {
      options.examples.forEach(({ prompt: text, tokens_per_step: rate, loses, overhead }, index) => {
        const values = { text, value: rate.toFixed(2), overhead };
        list[index].textContent = measured ? t(loses ? 'ui.example_loses' : 'ui.example', values) : text;
        list[index].title = measured && loses ? t('ui.example_loses_hint', values) : '';
      });
    },
  };
}

function chip(token, extra = {}) {
  return h('span', { class: `mv-chip mv-kind-${token.k}`, lang: 'und', 'data-source': token.src ?? null, ...extra }, token.t);
}

function drawChips(app, view) {
  const { parts, t } = app;
  const { chips, pending } = view.text;
  const keys = chips.map((token) => `${token.src}|${token.k}|${token.step}|${token.t}`);
  for (const old of parts.chips.querySelectorAll('[data-fresh]')) old.removeAttribute('data-fresh');
  replaceTail(parts.chips, keys, (index) => {
    const token = chips[index];
    const committed = token.src !== null && Number.isInteger(token.step) && token.step >= 0;
    if (!committed) return chip(token);
    return chip(token, { 'data-step': token.step, 'data-fresh': token.step === view.steps.index - 1,
      title: t('ui.chip_step', { step: token.step + 1 }) });
  });
  const pendingKeys = pending.map((token) => `${token.src}|${token.k}|${token.path}|${token.t}`);
  replaceTail(parts.pending, pendingKeys, (index) => chip(pending[index], { 'data-path': pending[index].path ?? '' }));
  parts.caret.hidden = pending.length === 0;
  parts.caret.textContent = t(view.run.pending ? 'ui.pending' : 'ui.committed_here');
  parts.text.toggleAttribute('data-past', !view.run.pending);
  parts.text.scrollTop = parts.text.scrollHeight;
}

function drawBranches(app, view) {
  const { parts, t } = app;
  const several = view.run.branches.length > 1;
  parts.branches.hidden = !several;
  const keys = view.run.branches.map((branch) => `${branch.name}|${branch.steps}|${branch.name === view.run.branch}`);
  replaceTail(parts.branches, several ? keys : [], (index) => {
    const branch = view.run.branches[index];
    return h('button', { 'aria-pressed': String(branch.name === view.run.branch),
      title: t('ui.branch_hint', { steps: branch.steps, fork: branch.fork }),
      onclick: () => app.act('branch', { name: branch.name }) }, branch.name);
  });
}

// Where the shown step stands: pending, committed long ago, or the last of a run that ended.
function standing({ steps: { index, count }, run }, t) {
  const step = count ? index + 1 : 0;
  if (run.pending || !count) return t('ui.step_of', { step, count });
  const last = run.finished && step === count;
  return last ? t('ui.step_ended', { step, count, why: run.finished_text }) : t('ui.history', { step, count });
}

// Dots show what each step committed; above a limit neighbours share one dot (the tallest of them).
function drawSlider(app, view) {
  const { parts, t } = app;
  const { index, count, committed } = view.steps;
  parts.slider.max = Math.max(0, count - 1);
  if (!app.link.unsettled || document.activeElement !== parts.slider) parts.slider.value = index;
  parts.slider.setAttribute('aria-valuetext', t('ui.step_of', { step: count ? index + 1 : 0, count }));
  parts.slider.disabled = count < 2;
  parts.stepCount.textContent = standing(view, t);
  const stride = Math.max(1, Math.ceil(count / DOT_LIMIT));
  const most = Math.max(1, ...committed);
  const groups = Array.from({ length: Math.ceil(count / stride) }, (_, g) =>
    Math.max(0, ...committed.slice(g * stride, (g + 1) * stride).map((value) => value ?? 0)));
  replaceTail(parts.dots, groups.map((value) => `${value}/${most}/${groups.length}`), (g) => h('i',
    { style: `height:${Math.round(4 + (DOT_MAX - 4) * groups[g] / most)}px;--share:${g / Math.max(1, groups.length - 1)}` }));
  [...parts.dots.children].forEach((dot, g) => dot.toggleAttribute('data-current', g === Math.floor(index / stride)));
}
