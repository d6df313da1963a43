// The Train page: a form on the left; the run shown, its curves, and the list of runs on the right.

import { h } from './dom.js';
import { createForm } from './train_form.js';
import { createPlots } from './train_plots.js';

const SEGMENTS = ['form', 'run', 'runs'];
const CALM_MS = 3000; // after Stop, before it can be pressed again: a double click must not end a run at once

export function create(page) {
  const { element, t } = page;
  const form = createForm(page, () => show('run'));
  const plots = createPlots(page);
  const run = createRun(page);
  const runs = createRuns(page, () => show('run'));
  const buttons = SEGMENTS.map((name) => h('button', { 'data-segment': name, onclick: () => show(name) }, t(`train.segment_${name}`)));
  const show = (segment) => {
    element.dataset.segment = segment;
    for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.segment === segment));
  };
  element.append(
    page.notice,
    h('nav', { class: 'mv-segments', 'aria-label': t('train.segments') }, ...buttons),
    form.element,
    h('div', { class: 'mv-train-run', role: 'group', 'aria-label': t('train.this_run') }, run.head, plots.element, run.foot),
    runs.element,
  );
  show('form');
  plots.theme(page.dark());
  let key = '';
  return {
    draw(view) {
      if (view.form) form.draw(view.form);
      form.lock(view.locked);
      runs.lock(view.locked);
      form.busy(view.busy);
      run.draw(view.run, view.locked);
      runs.draw(view.runs, view.run);
      if (view.figures) plots.draw(view.figures, view.key);
      key = view.key;
    },
    have: () => ({ have: key }),
    theme: plots.theme,
  };
}

// Head and foot of the run shown: state, progress, what can be done, and the latest numbers in words.
function createRun(page) {
  const { t, explorer } = page;
  let shown = null;
  let calm = false;
  const name = h('h2', { class: 'mv-run-name' });
  const state = h('span', { class: 'mv-run-state' });
  const said = h('p', { class: 'mv-run-said' });
  const bar = h('i');
  const button = (action, kind = '') => h('button', { id: `train-${action}`, class: kind, title: t(`train.${action}_hint`),
    onclick: () => press(action) }, t(`train.${action}`));
  const stop = button('stop');
  const resume = button('resume');
  const use = button('use', 'mv-action');
  const head = h('section', { class: 'mv-panel mv-run-head', 'aria-label': t('train.this_run') },
    h('div', { class: 'mv-run-title' }, name, state, h('span', { class: 'mv-run-buttons' }, stop, resume, use)),
    said, h('div', { class: 'mv-run-bar', 'aria-hidden': 'true' }, bar));
  const total = h('p', { class: 'mv-run-total' });
  const heldOut = h('p', { class: 'mv-run-held-out' });
  const foot = h('div', { class: 'mv-run-foot' }, total, heldOut);

  async function press(action) {
    if (!shown) return;
    const asked = { run: shown.id };
    if (action === 'stop') {
      asked.now = shown.state === 'stopping';
      rest(true);
      setTimeout(() => rest(false), CALM_MS);
    }
    await page.act(action, asked);
    if (action === 'use') explorer.act('poll');
  }

  function rest(on) {
    calm = on;
    stop.disabled = calm || !shown?.can.stop;
  }

  return {
    head, foot,
    draw(run, locked) {
      shown = run;
      name.textContent = run ? run.name : t('train.no_run');
      name.title = run ? run.id : '';
      state.textContent = run ? [run.recipe, run.state_text].filter(Boolean).join(' · ') : '';
      state.dataset.state = run?.state ?? '';
      head.dataset.state = run?.state ?? '';
      text(said, run ? run.sentence || run.progress || run.when : locked ? '' : t('train.no_run_hint'));
      said.dataset.state = run?.state === 'broken' ? 'broken' : '';
      bar.style.width = `${100 * (run?.fraction ?? 0)}%`;
      bar.parentElement.toggleAttribute('data-unknown', Boolean(run?.live) && run.fraction === null);
      rest(calm);
      stop.textContent = t(run?.state === 'stopping' ? 'train.stop_again' : 'train.stop');
      resume.disabled = !run?.can.resume;
      use.disabled = !run?.can.use;
      use.textContent = t(run?.in_use ? 'train.in_use' : 'train.use');
      text(total, run?.total ?? '');
      text(heldOut, run?.held_out ?? '');
    },
  };
}

// Long sentences are cut on screen and whole under the mouse.
function text(element, words) {
  if (element.textContent === words) return;
  element.textContent = words;
  element.title = words;
}

function createRuns(page, opened) {
  const { t } = page;
  const list = h('div', { class: 'mv-run-list', role: 'group', tabindex: -1, 'aria-label': t('train.run_list') });
  const path = h('input', { type: 'text', id: 'train-path', spellcheck: 'false', autocomplete: 'off', maxlength: 2000,
    'aria-label': t('train.path'), placeholder: t('train.path') });
  const open = (action, payload) => page.act(action, payload).then((view) => { if (view && !view.notice) opened(); });
  const place = h('form', { class: 'mv-run-path' }, path, h('button', {}, t('train.open')));
  place.addEventListener('submit', (event) => {
    event.preventDefault();
    open('open_path', { path: path.value });
  });
  const element = h('section', { class: 'mv-panel mv-train-runs', 'aria-label': t('train.runs') },
    h('div', { class: 'mv-panel-head' }, h('h2', {}, t('train.runs')), place), list);
  let rows = null;
  let none = '';

  function row(run) {
    const cells = ['name', 'recipe', 'when', 'state_text', 'numbers'].map((field) => h('span', { class: `mv-run-${field}` }));
    const made = h('button', { class: 'mv-run-row', onclick: () => open('open', { run: run.id }) }, ...cells);
    return { made, cells };
  }

  return {
    element,
    lock(on) {
      place.hidden = on;
      none = t(on ? 'train.locked' : 'train.runs_none');
    },
    draw(runs, shown) {
      if (!rows || runs.map((run) => run.id).join('\n') !== [...rows.keys()].join('\n')) {
        rows = new Map(runs.map((run) => [run.id, row(run)]));
        list.replaceChildren(...[...rows.values()].map(({ made }) => made));
        if (!runs.length) list.append(h('p', { class: 'mv-empty' }, none));
      }
      for (const run of runs) {
        const { made, cells } = rows.get(run.id);
        [run.name, run.recipe, run.when, run.state_text, run.numbers].forEach((words, index) => text(cells[index], words));
        made.dataset.state = run.state;
        made.setAttribute('aria-pressed', String(run.id === shown?.id));
      }
    },
  };
}
