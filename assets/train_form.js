// The form of a new run, made from what the server offers: recipes and their settings, models, token files, presets.

import { h } from './dom.js';

const OTHER = 'path';

export function createForm(page, started) {
  const { t } = page;
  const state = { form: null, recipe: null, fields: new Map() };
  const select = (id, label) => h('select', { id, 'aria-label': t(label) });
  const preset = select('train-preset', 'train.preset');
  const recipes = h('div', { class: 'mv-modes', role: 'radiogroup', 'aria-label': t('train.recipe') });
  const recipeHelp = h('p', { class: 'mv-form-help' });
  const model = select('train-model', 'train.model');
  const data = select('train-data', 'train.data');
  const path = h('input', { id: 'train-data-path', type: 'text', spellcheck: 'false', autocomplete: 'off', maxlength: 2000,
    'aria-label': t('train.data_path'), placeholder: t('train.data_path') });
  const distil = h('input', { id: 'train-distil', type: 'number', min: 0, step: 1000, 'aria-label': `${t('train.distil')} … ${t('train.distil_unit')}` });
  const main = h('div', { class: 'mv-fields' });
  const more = h('div', { class: 'mv-fields' });
  const name = h('input', { id: 'train-name', type: 'text', maxlength: 60, spellcheck: 'false', autocomplete: 'off',
    placeholder: t('train.name_hint'), 'aria-label': t('train.name') });
  const estimate = h('p', { class: 'mv-form-help', 'aria-live': 'polite' });
  const start = h('button', { id: 'train-start', class: 'mv-action', type: 'submit' }, t('train.start'));
  const row = (label, ...parts) => h('div', { class: 'mv-form-row' }, h('span', { class: 'mv-form-label', 'aria-hidden': 'true' }, t(label)), ...parts);
  const locked = h('p', { class: 'mv-empty mv-form-body', hidden: true }, t('train.locked'));
  const body = h('div', { class: 'mv-form-body' },
    preset, recipes, recipeHelp, row('train.model', model), row('train.data', data), path,
    h('label', { class: 'mv-form-write', title: t('train.distil_hint') }, t('train.distil'), distil, t('train.distil_unit')),
    main, h('details', { class: 'mv-form-more' }, h('summary', {}, t('train.more')), more), row('train.name', name));
  const foot = h('div', { class: 'mv-form-foot' }, estimate, start);
  const element = h('form', { class: 'mv-panel mv-train-form', 'aria-label': t('train.new') },
    h('div', { class: 'mv-panel-head' }, h('h2', {}, t('train.new'))), locked, body, foot);

  preset.addEventListener('change', () => fill());
  data.addEventListener('change', () => {
    path.disabled = data.value !== OTHER;
    if (!path.disabled) path.focus();
    fill();
  });
  element.addEventListener('input', ({ target }) => {
    if (target === distil || state.fields.has(target.name)) preset.value = '';
    tell();
  });
  element.addEventListener('submit', async (event) => {
    event.preventDefault();
    if (state.sent) return; // a double click starts one run
    state.sent = true;
    const view = await page.act('start', payload());
    state.sent = false;
    if (!view || view.notice) return;
    name.value = '';
    started();
  });

  function payload() {
    const settings = Object.fromEntries([...state.fields].map(([field, input]) => [field, valueOf(input)]));
    return { recipe: state.recipe, model: model.value, settings, name: name.value, distil: valueOf(distil),
      data: data.value === OTHER ? path.value.trim() : data.value };
  }

  const recipeNamed = (wanted) => state.form.recipes.find((recipe) => recipe.name === wanted);

  function choose(wanted) {
    state.recipe = wanted;
    const recipe = recipeNamed(wanted);
    recipeHelp.textContent = recipe.help;
    state.fields = new Map(recipe.fields.map((field) => [field.name, input(field)]));
    const rows = recipe.fields.map((field) => [field.main, h('label', { title: field.help }, label(t, field.name), state.fields.get(field.name))]);
    main.replaceChildren(...rows.filter(([first]) => first).map(([, made]) => made));
    more.replaceChildren(...rows.filter(([first]) => !first).map(([, made]) => made));
    if (!preset.value) preset.value = state.form.presets[0].name;
    fill();
  }

  // Defaults of the recipe, then what the preset changes.
  function fill() {
    const wanted = state.form.presets.find((one) => one.name === preset.value);
    for (const field of recipeNamed(state.recipe).fields) {
      if (wanted) state.fields.get(field.name).value = wanted.settings[field.name] ?? field.value;
    }
    if (wanted) distil.value = data.value ? 0 : wanted.distil;
    tell();
  }

  // How much work that is, as far as it is known before.
  function tell() {
    data.title = data.selectedOptions[0].text; // cut where it is long
    const file = state.form.data.find((one) => one.path === data.value);
    const most = valueOf(state.fields.get('tokens')) || Infinity; // 0 takes all there are
    const tokens = Math.min(most, (file?.tokens ?? 0) + (valueOf(distil) || 0));
    const batch = valueOf(state.fields.get('batch'));
    const passes = (valueOf(state.fields.get('passes')) || 0) + (valueOf(state.fields.get('heads_passes')) || 0);
    const steps = Math.ceil(tokens / batch) * passes;
    const known = data.value !== OTHER && tokens > 0 && Number.isFinite(steps);
    estimate.textContent = known ? t('train.estimate', { tokens, steps }) : t('train.estimate_unknown');
  }

  return {
    element,
    draw(form) {
      const first = state.form === null;
      state.form = form;
      options(preset, [...form.presets.map((one) => [one.name, one.label]), ['', t('train.preset_own')]]);
      options(model, form.models.map((one) => [one.name, one.label]));
      const before = data.value;
      const files = form.data.map((one) => [one.path, one.label]);
      const shipped = form.chosen ? [files.shift()] : [];
      options(data, [...shipped, ['', t('train.data_none')], ...files, [OTHER, t('train.data_path')]]);
      if (first) data.value = form.chosen;
      path.disabled = data.value !== OTHER;
      if (!first) {
        if (data.value !== before) fill(); // what was chosen is not there for this model
        return;
      }
      preset.value = form.presets[0].name;
      recipes.append(...form.recipes.map((recipe, index) => h('label', { title: recipe.help },
        h('input', { type: 'radio', name: 'train-recipe', value: recipe.name, checked: index === 0, onchange: () => choose(recipe.name) }), recipe.name)));
      choose(form.recipes[0].name);
    },
    // A server that trains nothing for visitors says so in place of the form.
    lock(on) {
      locked.hidden = !on;
      body.hidden = foot.hidden = on;
    },
    busy(on) { element.toggleAttribute('data-running', on); },
  };
}

const label = (t, name) => {
  const known = t(`train.field.${name}`);
  return known.startsWith('train.') ? name.replaceAll('_', ' ') : known;
};

// Numbers that are none become null, which the server names in a sentence.
const valueOf = (element) => (!element ? 0 : element.type !== 'number' ? element.value
  : Number.isNaN(element.valueAsNumber) ? null : element.valueAsNumber);

function input(field) {
  const common = { name: field.name, 'aria-description': field.help };
  if (field.choices) return h('select', common, ...field.choices.map((choice) => new Option(choice, choice)));
  return h('input', { type: 'number', min: field.low, max: field.high, step: field.whole ? 1 : 'any', ...common });
}

// Fills a select without losing what is chosen.
function options(select, list) {
  const key = JSON.stringify(list);
  if (select.dataset.key === key) return;
  const { value } = select;
  select.dataset.key = key;
  select.replaceChildren(...list.map(([own, words]) => new Option(words, own)));
  if (list.some(([own]) => own === value)) select.value = value;
}
