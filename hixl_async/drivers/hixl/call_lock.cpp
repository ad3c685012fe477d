#include "call_lock.hpp"

namespace hx {

namespace {
constexpr uint64_t PATIENCE = 200 * MS;  // more than a busy machine keeps a thread from running
}

// Under lock_: until no batch query is under way, and of `others` only calls that were written off.
void CallLock::wait(Kind *others) {
    const auto busy = [&] { return others != nullptr && others->running > others->stuck; };
    if (!sweeping_ && !busy()) return;
    const uint64_t end = clock_now() + PATIENCE;
    waiting_++;
    while (sweeping_ || busy()) {
        // A batch query is never written off: it may have the answer that the caller wants.
        if (!sweeping_ && clock_now() >= end) {
            others->stuck = others->running;
            others->stuck_before = clock_now();
            break;
        }
        changed_.wait(lock_, sweeping_ ? NEVER : end);
    }
    waiting_--;
}

CallLock::Single::Single(CallLock &owner, Kind &mine, Kind &others) : owner_(owner), kind_(mine) {
    if (!owner_.needed_) return;
    Guard guard(owner_.lock_);
    owner_.wait(&others);
    kind_.running++;
    since_ = clock_now();
}

CallLock::Single::~Single() {
    if (since_ == 0) return;
    Guard guard(owner_.lock_);
    kind_.running--;
    if (kind_.stuck > 0 && since_ <= kind_.stuck_before) kind_.stuck--;
    if (owner_.waiting_ > 0) owner_.changed_.all();
}

CallLock::Control::Control(CallLock &owner) : owner_(owner) {
    if (!owner_.needed_) return;
    Guard guard(owner_.lock_);
    owner_.wait(nullptr);
    owner_.controls_++;
    counted_ = true;
}

CallLock::Control::~Control() {
    if (!counted_) return;
    Guard guard(owner_.lock_);
    owner_.controls_--;
}

bool CallLock::try_sweep() {
    Guard guard(lock_);
    if (!needed_ || sweeping_ || transfers_.running > 0 || queries_.running > 0 || controls_ > 0) return false;
    sweeping_ = true;
    return true;
}

CallLock::Sweep::Sweep(CallLock &owner) : mine(owner.try_sweep()), owner_(owner) {}

CallLock::Sweep::~Sweep() {
    if (!mine) return;
    Guard guard(owner_.lock_);
    owner_.sweeping_ = false;
    if (owner_.waiting_ > 0) owner_.changed_.all();
}

}  // namespace hx
