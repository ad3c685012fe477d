// Which calls of HIXL exclude each other, on the back-end whose requests are heap pointers (CS).
//
// A query frees a finished request first and forgets its pointer later; a TransferAsync that gets the same pointer in
// between is forgotten with it.  So the two exclude each other, over all links.  A batch query takes the lock of every
// link, so that it must not run beside a call that holds one for long.  It also takes the answers of other links, so that
// no other query may ask for the same request meanwhile.
//
// No call waits long for one that is stuck: after 200 ms that one is written off, and what gets lost by it is seen as a
// failed request of its link.  A batch query is always waited for, because no call can hold it up.
#pragma once

#include "sync.hpp"

namespace hx {

class CallLock {
    struct Kind {
        uint32_t running = 0, stuck = 0;  // stuck: of those that run, written off
        uint64_t stuck_before = 0;        // they began before this
    };
    class Single {  // excludes calls of the other kind, and batch queries
      protected:
        Single(CallLock &owner, Kind &mine, Kind &others);
        ~Single();

      private:
        CallLock &owner_;
        Kind &kind_;
        uint64_t since_ = 0;
    };

  public:
    void open(bool needed) { needed_ = needed; }

    class Transfer : Single {  // around TransferAsync
      public:
        explicit Transfer(CallLock &owner) : Single(owner, owner.transfers_, owner.queries_) {}
    };
    class Query : Single {  // around single queries
      public:
        explicit Query(CallLock &owner) : Single(owner, owner.queries_, owner.transfers_) {}
    };
    class Control {  // around every other call that holds a link's lock
      public:
        explicit Control(CallLock &owner);
        ~Control();

      private:
        CallLock &owner_;
        bool counted_ = false;
    };
    class Sweep {  // around a batch query; only if `mine`
      public:
        explicit Sweep(CallLock &owner);
        ~Sweep();
        const bool mine;

      private:
        CallLock &owner_;
    };

  private:
    void wait(Kind *others);
    bool try_sweep();

    bool needed_ = false;
    Mutex lock_;
    Condition changed_;
    Kind transfers_, queries_;
    uint32_t controls_ = 0, waiting_ = 0;
    bool sweeping_ = false;
};

}  // namespace hx
