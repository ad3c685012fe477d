// Who may be inside which call of HIXL at once, on the back-end whose requests are heap pointers (CS).
//
// A query frees a finished request first and forgets its pointer later; a TransferAsync that gets the same pointer in
// between is forgotten with it.  So the two exclude each other, over all links.  A batch query takes the lock of every
// link, so that it must not meet a call that holds one for long, and takes answers of others, so that nobody may ask
// for the same request meanwhile.
//
// Nobody waits long for a call that is stuck: after some ms it is written off, and what then gets lost is seen as a
// failed request of that link.  A batch query is waited for, for it meets nobody who could hold it up.
#pragma once

#include "sync.hpp"

namespace hx {

class Gate {
    struct Kind {
        uint32_t running = 0, stuck = 0;  // stuck: of those that run, written off
        uint64_t stuck_before = 0;        // they began before this
    };
    class Single {  // excludes calls of the other kind, and batch queries
      protected:
        Single(Gate &gate, Kind &mine, Kind &others);
        ~Single();

      private:
        Gate &gate_;
        Kind &kind_;
        uint64_t since_ = 0;
    };

  public:
    void open(bool needed) { needed_ = needed; }

    class Transfer : Single {  // around TransferAsync
      public:
        explicit Transfer(Gate &gate) : Single(gate, gate.transfers_, gate.queries_) {}
    };
    class Query : Single {  // around single queries
      public:
        explicit Query(Gate &gate) : Single(gate, gate.queries_, gate.transfers_) {}
    };
    class Control {  // around whatever else holds a link's lock
      public:
        explicit Control(Gate &gate);
        ~Control();

      private:
        Gate &gate_;
        bool counted_ = false;
    };
    class Sweep {  // around a batch query; only if `mine`
      public:
        explicit Sweep(Gate &gate);
        ~Sweep();
        const bool mine;

      private:
        Gate &gate_;
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
