// The pages of the app. Which one is open stands on the root (data-page) and in the address (#train); every page but
// the Explorer is made when it is first opened.
//
// A page `x` is the module ./x.js with create(page), which fills page.element and returns {draw(view, job), open?(),
// close?(), theme?(dark), have?()}; what have() says of what is on screen goes with every look. `page` is {name, element, notice, t, options, explorer, act(action, payload), dark()}.

import { h } from './dom.js';
import { Link } from './link.js';
import { cutLine } from './whole.js';

const FIRST = 'explorer';
const PATIENCE = 4;

export function installPages(app) {
  const { root, parts, t, session } = app;
  const names = [FIRST, ...(session.page ? app.options.pages : [])];
  const made = new Map();
  let opened = null;
  parts.nav.hidden = names.length < 2;
  parts.nav.append(...names.map((name) => h('a', { href: `#${name}`, 'data-to': name }, t(`ui.page_${name}`))));

  const open = (name) => {
    if (name === opened) return;
    made.get(opened)?.leave();
    if (opened === FIRST) app.stop();
    opened = root.dataset.page = name;
    for (const link of parts.nav.children) {
      if (link.dataset.to === name) link.setAttribute('aria-current', 'page');
      else link.removeAttribute('aria-current');
    }
    document.title = name === FIRST ? t('ui.title') : `${t(`ui.page_${name}`)} · ${t('ui.title')}`;
    scrollTo(0, 0);
    if (name !== FIRST && !made.has(name)) made.set(name, new FurtherPage(app, name));
    made.get(name)?.enter();
  };
  const follow = () => {
    const wanted = location.hash.slice(1);
    open(names.includes(wanted) ? wanted : FIRST);
  };
  addEventListener('hashchange', follow);
  root.addEventListener('mv:theme', ({ detail }) => made.forEach((page) => page.theme(detail.dark)));
  app.openPage = (name) => { location.hash = name; };
  follow();
}

class FurtherPage {
  constructor(app, name) {
    const { t, session } = app;
    this.element = h('section', { class: `mv-view mv-${name}`, 'data-view': name, 'aria-label': t(`ui.page_${name}`) });
    this.notice = h('p', { class: 'mv-page-notice', role: 'status' });
    this.say = cutLine(this.notice);
    app.parts.dialog.before(this.element);
    const calls = {
      act: (action, payload) => session.page(name, action, payload),
      poll: () => session.page(name, 'poll', this.module?.have?.() ?? {}),
      waiting: () => session.waiting(),
    };
    this.link = new Link(calls, {
      onView: (view, job) => this.draw(view, job),
      onWaiting: (n) => { if (n > 0) this.say(t('ui.waiting', { n })); },
      onError: () => this.say(t('ui.page_lost')),
      onBusy: (busy) => { this.element.dataset.busy = String(busy); },
      merged: [], pollAfter: (view) => (this.entered ? view.poll : 0), patience: PATIENCE,
    });
    const page = { name, element: this.element, notice: this.notice, t, options: app.options, explorer: app, link: this.link,
      act: (action, payload = {}) => this.link.act(action, payload), dark: () => document.body.classList.contains('dark') };
    this.ready = import(`./${name}.js`).then(({ create }) => { this.module = create(page); })
      .catch((error) => {
        console.error(error);
        this.element.replaceChildren(h('p', { class: 'mv-page-notice' }, t('ui.page_failed')));
      });
  }

  async enter() {
    this.entered = true;
    this.element.hidden = false;
    await this.ready;
    if (!this.entered || !this.module) return;
    this.module.open?.();
    this.link.act('hello');
  }

  leave() {
    this.entered = false;
    this.element.hidden = true;
    this.link.close();
    this.module?.close?.();
  }

  async draw(view, job) {
    this.say(view.notice);
    await this.module.draw(view, job);
    this.element.dataset.stamp = view.stamp;
  }

  theme(dark) {
    this.module?.theme?.(dark);
  }
}
