#include "gate.hpp"

namespace hx {

namespace {
constexpr uint64_t PATIENCE = 3 * MS;
}

// Under lock_: until nobody is in the way, or what is has been there for too long.
template <class Busy>
void Gate::wait(Busy busy) {
    if (!busy()) return;
    const uint64_t end = clock_now() + PATIENCE;
    waiting_++;
    while (busy()) {
        if (clock_now() >= end) {
            stuck_ = transfers_;
            stuck_before_ = clock_now();
            break;
        }
        changed_.wait(lock_, end);
    }
    waiting_--;
}

Gate::Transfer::Transfer(Gate &gate) : gate_(gate) {
    if (!gate_.needed_) return;
    Guard guard(gate_.lock_);
    gate_.wait([&] { return gate_.queries_ > 0 || gate_.sweeping_; });
    gate_.transfers_++;
    counted_ = true;
    since_ = clock_now();
}

Gate::Transfer::~Transfer() {
    if (!counted_) return;
    Guard guard(gate_.lock_);
    gate_.transfers_--;
    if (gate_.stuck_ > 0 && since_ <= gate_.stuck_before_) gate_.stuck_--;
    if (gate_.waiting_ > 0) gate_.changed_.all();
}

Gate::Query::Query(Gate &gate) : gate_(gate) {
    if (!gate_.needed_) return;
    Guard guard(gate_.lock_);
    gate_.wait([&] { return gate_.transfers_ > gate_.stuck_ || gate_.sweeping_; });
    gate_.queries_++;
    counted_ = true;
}

Gate::Query::~Query() {
    if (!counted_) return;
    Guard guard(gate_.lock_);
    gate_.queries_--;
    if (gate_.waiting_ > 0) gate_.changed_.all();
}

Gate::Control::Control(Gate &gate) : gate_(gate) {
    if (!gate_.needed_) return;
    Guard guard(gate_.lock_);
    gate_.wait([&] { return gate_.sweeping_; });
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
    if (!needed_ || sweeping_ || transfers_ > 0 || queries_ > 0 || controls_ > 0) return false;
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
