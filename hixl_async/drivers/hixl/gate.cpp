#include "gate.hpp"

namespace hx {

namespace {
constexpr uint64_t PATIENCE = 20 * MS;
}

// Under lock_: until no batch query is under way, and no call of `others` but those that have been there for too long.
void Gate::wait(Kind *others) {
    const auto busy = [&] { return others != nullptr && others->running > others->stuck; };
    if (!sweeping_ && !busy()) return;
    const uint64_t end = clock_now() + PATIENCE;
    waiting_++;
    while (sweeping_ || busy()) {
        // A batch query is never written off: it may have the answer of whoever waits here.
        if (!sweeping_ && clock_now() >= end) {
            others->stuck = others->running;
            others->stuck_before = clock_now();
            break;
        }
        changed_.wait(lock_, sweeping_ ? NEVER : end);
    }
    waiting_--;
}

Gate::Single::Single(Gate &gate, Kind &mine, Kind &others) : gate_(gate), kind_(mine) {
    if (!gate_.needed_) return;
    Guard guard(gate_.lock_);
    gate_.wait(&others);
    kind_.running++;
    since_ = clock_now();
}

Gate::Single::~Single() {
    if (since_ == 0) return;
    Guard guard(gate_.lock_);
    kind_.running--;
    if (kind_.stuck > 0 && since_ <= kind_.stuck_before) kind_.stuck--;
    if (gate_.waiting_ > 0) gate_.changed_.all();
}

Gate::Control::Control(Gate &gate) : gate_(gate) {
    if (!gate_.needed_) return;
    Guard guard(gate_.lock_);
    gate_.wait(nullptr);
    gate_.controls_++;
    counted_ = true;
}

Gate::Control::~Control() {
    if (!counted_) return;
    Guard guard(gate_.lock_);
    gate_.controls_--;
}

bool Gate::try_sweep() {
    Guard guard(lock_);
    if (!needed_ || sweeping_ || transfers_.running > 0 || queries_.running > 0 || controls_ > 0) return false;
    sweeping_ = true;
    return true;
}

Gate::Sweep::Sweep(Gate &gate) : mine(gate.try_sweep()), gate_(gate) {}

Gate::Sweep::~Sweep() {
    if (!mine) return;
    Guard guard(gate_.lock_);
    gate_.sweeping_ = false;
    if (gate_.waiting_ > 0) gate_.changed_.all();
}

}  // namespace hx
