// Who may be inside which call of HIXL at once, on the back-end whose requests are heap pointers (CS).
//
// A query frees a finished request first and forgets its pointer later; a TransferAsync that gets the same pointer in
// between is forgotten with it.  So the two exclude each other, over all links.  A batch query takes the lock of every
// link, so that it must not meet a call that holds one for long, and takes answers of others, so that nobody may ask
// for the same request meanwhile.
//
// Nobody waits long for a call that is stuck: after a few ms it is written off, and what then gets lost is seen as a
// failed request of that link.
#pragma once

#include "sync.hpp"

namespace hx {

class Gate {
  public:
    void open(bool needed) { needed_ = needed; }

    class Transfer {  // around TransferAsync
      public:
        explicit Transfer(Gate &gate);
        ~Transfer();

      private:
        Gate &gate_;
        bool counted_ = false;
        uint64_t since_ = 0;
    };
    class Query {  // around single queries
      public:
        explicit Query(Gate &gate);
        ~Query();

      private:
        Gate &gate_;
        bool counted_ = false;
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
    template <class Busy>
    void wait(Busy busy);
    bool try_sweep();

    bool needed_ = false;
    Mutex lock_;
    Condition changed_;
    uint32_t transfers_ = 0, queries_ = 0, controls_ = 0, waiting_ = 0;
    uint32_t stuck_ = 0;         // transfers that are written off
    uint64_t stuck_before_ = 0;  // they began before this
    bool sweeping_ = false;
};

}  // namespace hx
