// Calls to the server: one in flight, the last value of a knob or of the slider wins, stale replies are dropped.

const QUEUE_LIMIT = 8;
const SLOW_MS = 500;
const MOST_PATIENT = 40;
const STAMP = /"stamp":\d+,?/;

export class Link {
  // onView(view, job) draws and may be awaited; onError(error) gets what a call threw; onBusy(flag) shows the bar;
  // onWaiting(n) hears how many people are served before us. `merged` are the actions whose last value wins;
  // pollAfter(view) is the milliseconds to the next look, which grow up to `patience` times while nothing comes of it.
  constructor(session, { onView, onError, onBusy, onWaiting, merged, pollAfter, patience = MOST_PATIENT }) {
    Object.assign(this, { session, onView, onError, onBusy, onWaiting, merged, pollAfter, patience });
    this.queue = [];
    this.running = false;
    this.stamp = -1;
    this.drawn = '';
    this.looks = 0;
    this.poller = null;
  }

  // Resolves with the view once drawn, or null when the call failed or its reply came too late.
  act(action, payload = {}) {
    const merged = this.merge(action, payload);
    if (merged) return merged;
    if (this.queue.length >= QUEUE_LIMIT) return Promise.resolve(null);
    const job = { action, payload, at: performance.now() };
    job.promise = new Promise((resolve) => { job.resolve = resolve; });
    this.queue.push(job);
    this.pump();
    return job.promise;
  }

  merge(action, payload) {
    const last = this.queue.at(-1);
    if (!last || last.action !== action || !this.merged.includes(action)) return null;
    last.payload = { ...last.payload, ...payload };
    last.at = performance.now();
    return last.promise;
  }

  // True while a knob move is still on its way: the controls then show what the person set, not the last reply.
  get unsettled() {
    return this.running || this.queue.length > 0;
  }

  async pump() {
    if (this.running) return;
    this.running = true;
    this.onBusy(true);
    while (this.queue.length) {
      const job = this.queue.shift();
      job.resolve(await this.call(job));
    }
    this.running = false;
    this.onBusy(false);
  }

  async call(job) {
    const slow = setInterval(() => this.peek(), SLOW_MS);
    try {
      const reply = await this.session.act(job.action, job.payload);
      clearInterval(slow);
      return await this.accept(reply, job);
    } catch (error) {
      this.onError(error);
      this.lookLater(); // the reply that would have set the next look has not come
      return null;
    } finally {
      clearInterval(slow);
    }
  }

  async accept(reply, job) {
    const view = JSON.parse(reply);
    if (view.stamp < this.stamp) return null;
    this.stamp = view.stamp;
    const drawn = reply.replace(STAMP, '');
    const news = job.action !== 'poll' || drawn !== this.drawn;
    this.looks = news ? 0 : this.looks + 1;
    if (news) await this.onView(view, job);
    this.drawn = drawn;
    this.schedule(view);
    return view;
  }

  // While a long call runs, the status line says who comes first ("2 people before you").
  async peek() {
    try {
      this.onWaiting(await this.session.waiting());
    } catch {
      // The call that is under way reports a lost connection; a failed look at the status need not.
    }
  }

  // Looks grow rarer while nothing comes of them; any action begins anew.
  schedule(view) {
    clearTimeout(this.poller);
    const wait = this.pollAfter(view) * Math.min(this.patience, 1.2 ** this.looks);
    if (wait) this.poller = setTimeout(() => this.poll(), wait);
  }

  async poll() {
    if (this.running) {
      this.poller = setTimeout(() => this.poll(), SLOW_MS);
      return;
    }
    try {
      const reply = await this.session.poll();
      // An action was begun meanwhile: its reply is the newer one and sets the next look.
      if (!this.running) await this.accept(reply, { action: 'poll', payload: {}, at: performance.now() });
    } catch (error) {
      this.onError(error);
      this.lookLater();
    }
  }

  lookLater() {
    clearTimeout(this.poller);
    this.poller = setTimeout(() => this.poll(), 3000);
  }

  close() {
    clearTimeout(this.poller);
    for (const job of this.queue.splice(0)) job.resolve(null);
  }
}
