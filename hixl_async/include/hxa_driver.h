/* The driver interface: the only thing a driver and the core share.  No Python.h here.
 *
 * A driver moves bytes between this process and its peers.  It is a table of C functions (hxa_driver) in a PyCapsule
 * named HXA_DRIVER_CAPSULE, found by the entry-point group "hixl_async.drivers" (hxa_module.h makes the module).  The table
 * grows only at its end: `size` says how much of it a driver fills, and an optional member that is NULL is not supported.
 *
 * Threading rules
 *   T1  Every function of the table is called without the Python error indicator set, and a driver never calls Python.
 *   T2  The core calls everything of one instance but `after_fork` and `error_text` from one thread, the thread of the event
 *       loop.  Nothing may block longer than an inline copy of limits.inline_bytes; anything longer returns HXA_PENDING and
 *       finishes on a thread of the driver.  `close` alone may wait, for threads.
 *   T3  `sink->post` and `sink->event` may be called from any thread, also inside a call of the table; they never block and
 *       never call back into the driver.  Threads of a driver must not hold a lock around them that a call of T2
 *       waits for.
 *   T4  An accepted op (HXA_PENDING) gets exactly one HXA_COMPLETED and then, or with it, exactly one HXA_RELEASED.  Ops that
 *       are done or refused get neither.  COMPLETED says that the outcome in the op's fields is final; RELEASED says that the
 *       local memory of the op is no longer read or written, and is the last time that the driver touches op or batch.
 *   T5  Order: the data of a batch is visible at the target before its signal, and the signal before its notification.  Two
 *       batches have no order.  Notifications of one link arrive in the order in which their batches finished.
 *   T6  Values in memory that a peer can write are read once into a copy, and the copy is checked against limits before use.
 */
#ifndef HXA_DRIVER_H
#define HXA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HXA_DRIVER_ABI 1
#define HXA_DRIVER_CAPSULE "hixl_async.driver.v1"

/* ---- results --------------------------------------------------------------------------------------------------------- */

enum {                       /* results of calls that take an op; errors are negative hxa_status values */
    HXA_DONE = 0,            /* finished inside the call; the op gets no event */
    HXA_PENDING = 1          /* accepted; T4 applies */
};

enum {                       /* hxa_op.status, and negated the refusal of a call */
    HXA_OK = 0,
    HXA_E_INVALID = 1,       /* a malformed argument */
    HXA_E_RANGE = 2,         /* outside a memory */
    HXA_E_RIGHTS = 3,        /* the memory or the operating system forbids it */
    HXA_E_UNSUPPORTED = 4,   /* this driver cannot do that */
    HXA_E_NOMEM = 5,         /* memory, descriptors or address space ran out */
    HXA_E_BUSY = 6,          /* a bounded resource is in use; try again later */
    HXA_E_LINK = 7,          /* the link is down, or the peer has ended */
    HXA_E_CANCELLED = 8,     /* stopped by `cancel` before all bytes moved */
    HXA_E_TIMEOUT = 9,       /* the transport gave up waiting */
    HXA_E_PROTOCOL = 10,     /* the peer's half of the metadata, or its ring, is malformed */
    HXA_E_SYSTEM = 11        /* errno in `native` */
};

/* The refusal of a call with the transport's own code (errno, for example), because a call without an op has no other place
 * for it.  A refusal without such a code is just the negated status. */
#define HXA_REFUSAL(status, native) (-((int)(status) | (int)(native) << 8))
static inline int32_t hxa_refusal_status(int answer) { return -answer & 0xff; }
static inline int32_t hxa_refusal_native(int answer) { return -answer >> 8; }

enum { HXA_COMPLETED = 1u, HXA_RELEASED = 2u };          /* events of sink->post */
enum { HXA_SCOPE_OP = 0, HXA_SCOPE_LINK = 1 };           /* how far a failure reaches */

enum { HXA_READ = 0, HXA_WRITE = 1 };                    /* verbs, from the caller's side */
enum { HXA_RIGHT_READ = 1u, HXA_RIGHT_WRITE = 2u };      /* access that a peer may have */
enum { HXA_KIND_HOST = 0, HXA_KIND_DEVICE = 1 };         /* location of memory */
enum { HXA_PRIORITY_LOW = -1, HXA_PRIORITY_NORMAL = 0, HXA_PRIORITY_HIGH = 1 };

enum {                                                   /* hxa_driver.caps */
    HXA_CAP_LOCAL_ANY = 1u << 0,      /* local sides need no registration (desc.lmem may be NULL) */
    HXA_CAP_ALLOC = 1u << 1,          /* mem_alloc */
    HXA_CAP_REGISTER = 1u << 2,       /* mem_register of memory that already exists */
    HXA_CAP_SAME_HOST = 1u << 3,      /* links only to processes of this host; the data of a link's metadata begins with its
                                       * maker's pid as uint32_t, which the core replaces before link_connect by the number
                                       * that the kernel has for the process at the other end of the control connection, or
                                       * by 0 where it has none: the two differ between pid namespaces */
    HXA_CAP_SIGNAL = 1u << 4,         /* batch.signal */
    HXA_CAP_NOTIFY = 1u << 5,         /* batch.topic / batch.note */
    HXA_CAP_CANCEL = 1u << 6,         /* cancel can stop an accepted op */
    HXA_CAP_FDS = 1u << 7             /* metadata may carry file descriptors */
};

/* ---- data ------------------------------------------------------------------------------------------------------------ */

typedef struct hxa_instance hxa_instance;     /* an opened driver */
typedef struct hxa_link hxa_link;             /* one connected peer */
typedef struct hxa_mem hxa_mem;               /* memory of ours, or of a peer after mem_import */

typedef struct hxa_op {       /* one accepted piece of work; lies inside the core's slot, address fixed until released */
    struct hxa_op *next;      /* the mailbox's list */
    uint32_t events;          /* the mailbox's: events posted and not yet drained */
    int32_t status;           /* hxa_status; final from COMPLETED on */
    int32_t native;           /* the transport's own code, for people */
    uint32_t scope;           /* HXA_SCOPE_* of a failure */
    int64_t failed;           /* index of the descriptor that failed, -1 where unknown */
    uint64_t bytes;           /* bytes that moved */
    void *owner;              /* the core's; drivers do not touch it */
    void *scratch[6];         /* the driver's, from acceptance to release */
} hxa_op;

typedef struct hxa_desc {     /* one contiguous copy; the core has checked bounds, rights and overflow of both sides */
    hxa_mem *lmem;            /* local memory, or NULL: loff is an address (HXA_CAP_LOCAL_ANY) */
    uint64_t loff;            /* bytes into lmem */
    hxa_mem *rmem;            /* imported memory */
    uint64_t roff;            /* bytes into rmem */
    uint64_t len;             /* bytes, never 0 */
} hxa_desc;

typedef struct hxa_batch {    /* one unit of completion; the caller keeps it, and all that it points to, until RELEASED */
    uint32_t verb;            /* HXA_READ, HXA_WRITE */
    int32_t priority;         /* HXA_PRIORITY_* */
    size_t n;                 /* descriptors; 0: a bare signal or notification */
    const hxa_desc *desc;
    uint64_t bytes;           /* sum of len */
    hxa_mem *signal;          /* NULL, or where to store signal_value (8 bytes, aligned) after the data */
    uint64_t signal_off;
    uint64_t signal_value;
    const void *topic;        /* NULL, or a notification for the peer after data and signal */
    uint32_t topic_len;
    uint32_t note_len;
    const void *note;
} hxa_batch;

enum { HXA_METADATA_BYTES = 1024, HXA_METADATA_FDS = 4, HXA_MESSAGE_BYTES = 40960 };

typedef struct hxa_metadata {     /* metadata that one side needs of the other, carried by the control connection */
    uint32_t len;
    uint32_t nfds;
    int fds[HXA_METADATA_FDS];    /* of filled metadata: the receiver owns and closes them */
    uint8_t data[HXA_METADATA_BYTES];
} hxa_metadata;

typedef struct hxa_option { const char *key, *value; } hxa_option;

typedef struct hxa_limits {
    uint64_t descriptors;     /* most in one batch */
    uint64_t note_bytes;      /* most of topic + note together */
    uint64_t inline_bytes;    /* batches up to this may finish inside submit */
    uint64_t alignment;       /* of addresses and lengths; 1 = any */
    uint64_t caps;            /* HXA_CAP_* of this instance; 0 = those of the table (the core clears the struct before) */
} hxa_limits;

typedef struct hxa_stats {
    uint64_t ops_inline, ops_queued, bytes_read, bytes_written;
    uint64_t notes_sent, notes_received, signals_sent, wakes_sent, wakes_received;
    uint64_t links, memories, threads;       /* gauges; all zero after close */
} hxa_stats;

enum hxa_event_kind {
    HXA_EVENT_NOTE = 1,       /* a notification: topic, data */
    HXA_EVENT_SIGNAL = 2,     /* some signal word of ours may have changed */
    HXA_EVENT_LINK_DOWN = 3,  /* the link broke; status says why, data is text */
    HXA_EVENT_LOG = 4,        /* data is a line for the log; a warning if status is not 0 */
    HXA_EVENT_MESSAGE = 5     /* data, at most HXA_MESSAGE_BYTES, is for the driver at the other end of the link: the core carries
                               * it over the control connection, in order, to `message` there.  A peer that does not read is
                               * dropped when a thousand messages or 512 KiB wait for it, so a driver must keep less queued.
                               * After link_stop has finished a driver only replies. */
};

typedef struct hxa_event {    /* the sink copies topic and data before it returns */
    uint64_t link;            /* the cookie given to link_new; 0 for none */
    uint32_t kind;
    int32_t status;
    const void *topic;
    const void *data;
    uint32_t topic_len;
    uint32_t data_len;
} hxa_event;

typedef struct hxa_sink {
    void *ctx;
    void (*post)(void *ctx, hxa_op *op, uint32_t events);
    void (*event)(void *ctx, const hxa_event *event);
} hxa_sink;

/* ---- the table ------------------------------------------------------------------------------------------------------- */

typedef struct hxa_driver {
    uint32_t abi;             /* HXA_DRIVER_ABI */
    uint32_t size;            /* sizeof(hxa_driver) of the driver */
    const char *name;
    uint64_t caps;

    /* Life.  open: options are strings that the driver documents; on failure a sentence for people is written to error,
     * and HXA_E_UNSUPPORTED means that something it needs is not installed. */
    int (*open)(const hxa_option *options, size_t n, const hxa_sink *sink, hxa_instance **self, char *error, size_t error_len);
    void (*close)(hxa_instance *self);                 /* no links, memories or ops are left; joins threads, frees self */
    void (*after_fork)(hxa_instance *self);            /* in the child: close descriptors, touch nothing of the parent's */
    void (*limits)(hxa_instance *self, hxa_limits *out);
    void (*stats)(hxa_instance *self, hxa_stats *out);
    const char *(*error_text)(int32_t status, int32_t native);     /* static or thread-local text */

    /* Memory.  rights is the most access that any peer may be given.  import needs a link that is up and owns the metadata's
     * descriptors from the call on; once it has returned PENDING *mem needs mem_release, whatever the outcome of the op.  A
     * refusal of import or connect may leave its reason in op->native.  alloc is the exception to T2: it returns an address, so
     * it takes as long as the transport's own allocation does. */
    int (*mem_alloc)(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem, void **address);
    int (*mem_register)(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights, hxa_mem **mem);
    int (*mem_export)(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata);
    int (*mem_import)(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **mem, hxa_op *op);
    void (*mem_release)(hxa_mem *mem);                 /* ours or imported; no op uses it */

    /* Links.  new makes our half and its metadata; connect joins it with the peer's metadata; fd (or -1) is readable when poll has
     * work, and the core also polls once after connect.  stop ends our side: accepted ops of the link complete with HXA_E_LINK and
     * are released when no thread of ours touches their memory any more, then op finishes; new submits are refused.  dead, if
     * not 0, says that the peer's process is known to have ended, so nothing waits for it.  fence is done when the peer can no
     * longer touch memory of ours through this link (it may never come; stop with dead=1 ends it too).  free comes after stop
     * finished. */
    int (*link_new)(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_metadata *metadata);
    int (*link_connect)(hxa_link *link, const hxa_metadata *metadata, hxa_op *op);
    int (*link_fd)(hxa_link *link);
    int (*link_stop)(hxa_link *link, int dead, hxa_op *op);
    int (*link_fence)(hxa_link *link, hxa_op *op);
    void (*link_free)(hxa_link *link);

    /* Work.  submit: DONE, PENDING or a refusal that left everything untouched.  cancel: 1 it will complete early, 0 too late
     * or impossible.  progress: bytes landed so far.  poll: at most `budget` events; returns 1 while more is waiting. */
    int (*submit)(hxa_link *link, const hxa_batch *batch, hxa_op *op);
    int (*cancel)(hxa_link *link, hxa_op *op);
    uint64_t (*progress)(hxa_link *link, const hxa_op *op);
    int (*poll)(hxa_link *link, uint32_t budget);

    /* Of transports whose own calls block; each may be NULL.
     * start: op finishes when links can be made; memory may be allocated and registered before.  shutdown: once no links are
     * left and start is over, even if it failed, ends what would make `close` wait.  mem_ready: op finishes when peers may be
     * told of memory of ours, or with the reason why they never may; before that mem_export returns BUSY.  mem_retire, in
     * place of mem_release for memory of ours: nothing uses it from the call on, and op finishes when the transport has released
     * it; the caller keeps its pages until then.  It is asked once, after a mem_ready that was asked has finished; after
     * shutdown mem_release takes its place.  message: takes what the driver at the other end sent by HXA_EVENT_MESSAGE, in order,
     * from our link_connect to link_free; a refusal loses the peer.  abandon: the outcome of op no longer matters, and cancel could
     * not stop it; it is to be released in bounded time, even if other ops of the link fail because of it. */
    int (*start)(hxa_instance *self, hxa_op *op);
    int (*shutdown)(hxa_instance *self, hxa_op *op);
    int (*mem_ready)(hxa_mem *mem, hxa_op *op);
    int (*mem_retire)(hxa_mem *mem, hxa_op *op);
    int (*message)(hxa_link *link, const void *data, size_t len);
    int (*abandon)(hxa_link *link, hxa_op *op);

    /* Limit the bytes per second from now on; 0 for no limit; may be NULL. */
    int (*link_pace)(hxa_link *link, uint64_t bytes_per_second);

    /* Facts about this instance and the transport below it, for people: lines of "name: text", valid until the next call; also
     * before start; may be NULL. */
    const char *(*about)(hxa_instance *self);

    /* Lend the mapped address of imported memory to a device that copies by itself; the link is neither fenced nor stopped before
     * mem_return.  DONE or a refusal; may be NULL. */
    int (*mem_borrow)(hxa_link *link, hxa_mem *mem, void **address);
    void (*mem_return)(hxa_link *link, hxa_mem *mem);

    /* Return 1 while an op only waits behind others or a limit, so that it is not stalled; may be NULL. */
    int (*waits)(hxa_link *link, const hxa_op *op);
} hxa_driver;

/* The least `size` of a table: the members that all drivers have. */
#define HXA_DRIVER_MIN_SIZE offsetof(hxa_driver, start)

/* Shorthands for drivers. */
static inline void hxa_complete(const hxa_sink *sink, hxa_op *op) { sink->post(sink->ctx, op, HXA_COMPLETED); }
static inline void hxa_release(const hxa_sink *sink, hxa_op *op) { sink->post(sink->ctx, op, HXA_RELEASED); }
static inline void hxa_finish(const hxa_sink *sink, hxa_op *op) { sink->post(sink->ctx, op, HXA_COMPLETED | HXA_RELEASED); }

#ifdef __cplusplus
}
#endif
#endif /* HXA_DRIVER_H */
