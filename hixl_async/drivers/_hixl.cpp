// The HIXL driver: transfers between Ascend NPUs, and whatever else `libcann_hixl.so` reaches.
//
// HIXL's transfers are requests that have to be asked about again and again, its other calls block, and a failure costs
// the whole connection.  This driver hides that.  The parts, each of which uses only those above it:
//
//   abi, library        our mirror of HIXL's types; finding and loading it
//   options, json       what `open` takes;  address, number: texts
//   status              codes, and what to do about them
//   thread_pool         threads, strands, the watchdog;  sync: locks and time;  call_lock: calls that exclude each other
//   notes               notifications as numbered records in frames;  protocol: messages between two drivers
//   request             the requests that HIXL has
//   instance            one engine of HIXL, and what its parts share
//   link.hpp            one peer's use of an endpoint;  doorbell: makes the loop poll it
//   operation           one accepted op
//   notification_io     sending and fetching notifications
//   request_queue       submitting requests, asking about them, finishing ops
//   connection          HIXL's Connect and Disconnect;  sockets: ends calls that wait for a peer
//   endpoint            one remote engine: connected, renewed, cut, given up
//   memory, host_memory mem_*: memory that is allocated, registered, imported, released
//   link                link_*: metadata, messages, submit, stop, fence, poll
//   life, about         opening, starting, ending; facts about an instance
//
// Options (strings):
//   library             file or folder of libcann_hixl.so     default ASCEND_HOME_PATH, usual roots, loader's path
//   hixl_ip, hixl_port  where HIXL listens, as peers reach it default 127.0.0.1 and a free port
//   device              the NPU                               default: of the caller's context, else 0
//   backend             auto, comm, cs or fab: presets the options that choose it
//   host_memory         auto, pinned or pages: of mem_alloc
//   notify_via          hixl or control (connection)          default hixl
//   connect_via         threads or async (ConnectAsync)       default threads
//   connect_timeout_ms  of Connect and Disconnect             default 5000
//   notify_timeout_ms   of SendNotify                         default 1000
//   busy_ms             how long RESOURCE_EXHAUSTED is retried    default 2000
//   in_flight           requests per peer inside HIXL         1..4096, default 512
//   request_descriptors most in one request                   1..65536, default 4096
//   pending_notes       notifications per link that may wait  default 1024
//   spin_us             spinning before sleeping              default 50; 0 where there is one CPU
//   poll_max_us         longest sleep between two polls       default 500
//   notes_poll_ms       the same for notifications            default 20
//   threads             most                                  default 64
// All other options go to HIXL's Initialize as they are: BufferPool, GlobalResourceConfig, AutoConnect, LocalCommRes,
// EnableUseFabricMem, RdmaTrafficClass, RdmaServiceLevel, with or without "adxl."; of others a warning tells.
#include "hxa_module.h"

#include <new>

#include "hixl/about.hpp"
#include "hixl/life.hpp"
#include "hixl/link.hpp"
#include "hixl/memory.hpp"
#include "hixl/status.hpp"

namespace {

// No exception may pass into C.  Only a lack of memory is expected to raise one.
template <auto function, class... Arguments>
int guarded(Arguments... arguments) noexcept {
    try {
        return function(arguments...);
    } catch (const std::bad_alloc &) {
        return -HXA_E_NOMEM;
    } catch (...) {
        return -HXA_E_SYSTEM;
    }
}

constexpr hxa_driver make_table() {
    hxa_driver table = {};
    table.abi = HXA_DRIVER_ABI;
    table.size = sizeof(hxa_driver);
    table.name = "hixl";
    table.caps = HXA_CAP_ALLOC | HXA_CAP_REGISTER | HXA_CAP_SIGNAL | HXA_CAP_NOTIFY | HXA_CAP_CANCEL;
    table.open = guarded<hx::instance_open>;
    table.close = hx::instance_close;
    table.after_fork = hx::instance_after_fork;
    table.limits = hx::instance_limits;
    table.stats = hx::instance_stats;
    table.error_text = hx::error_text;
    table.mem_alloc = guarded<hx::mem_alloc>;
    table.mem_register = guarded<hx::mem_register>;
    table.mem_export = guarded<hx::mem_export>;
    table.mem_import = guarded<hx::mem_import>;
    table.mem_release = hx::mem_release;
    table.link_new = guarded<hx::link_new>;
    table.link_connect = guarded<hx::link_connect>;
    table.link_fd = hx::link_fd;
    table.link_stop = guarded<hx::link_stop>;
    table.link_fence = guarded<hx::link_fence>;
    table.link_free = hx::link_free;
    table.submit = guarded<hx::submit>;
    table.cancel = guarded<hx::cancel>;
    table.progress = hx::progress;
    table.poll = guarded<hx::link_poll>;
    table.start = guarded<hx::instance_start>;
    table.shutdown = guarded<hx::instance_shutdown>;
    table.mem_ready = guarded<hx::mem_ready>;
    table.mem_retire = guarded<hx::mem_retire>;
    table.message = guarded<hx::link_message>;
    table.abandon = guarded<hx::abandon>;
    table.about = hx::instance_about;
    return table;
}

const hxa_driver hixl_driver = make_table();

}  // namespace

HXA_DRIVER_MODULE(_hixl, hixl_driver)
