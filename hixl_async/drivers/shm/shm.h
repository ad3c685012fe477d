/* What the parts of the shared-memory driver share.
 *
 *   ../_shm.c    the table, options, statistics, texts
 *   segment.c    memfd segments: making, sealing, distrusting and mapping them
 *   memory.c     mem_*: regions of ours, imports of a peer's
 *   doorbell.c   waking the peer: a pipe
 *   ring.c       notification records in memory that the other side can scribble on
 *   link.c       link_*: the two halves of a link, stop, fence, poll
 *   notes.c      who may append notifications, and those that wait for room
 *   copy.c       submit and cancel; moving bytes by memcpy or process_vm_*
 *   workers.c    copy threads
 *
 * Two kinds of threads run here: the loop (the thread of T2) and the copy threads.  The loop never waits for a copy thread:
 * it pushes ops on lock-free stacks, sets flags, and wakes.  Copy threads share one mutex that the loop never takes.
 */
#ifndef HXA_SHM_H
#define HXA_SHM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include "hxa_driver.h"
#include "hxa_retry.h"

#define SHM_INTERNAL __attribute__((visibility("hidden")))

enum {
    SHM_LINE = 128,                    /* two cache lines: neighbours are fetched in pairs */
    SHM_PAGE = 4096,                   /* the half's header; rings start here */
    SHM_RING_MAX = 64 << 20,           /* bytes of a notification ring */
    SHM_THREADS_MAX = 64,
    SHM_CHUNK_DESCRIPTORS = 4096,      /* most descriptors in one chunk of a copy */
    SHM_DESCRIPTORS = 1 << 16          /* most in one batch: checking them takes the loop 0.1 ms */
};

/* Shorthands for the __atomic builtins.  Dekker's pattern (store mine, look at theirs) uses the _sc forms on both sides. */
#define shm_load(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define shm_load_acq(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define shm_load_sc(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define shm_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define shm_store_rel(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define shm_store_sc(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
#define shm_swap_sc(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define shm_add(p, v) ((void)__atomic_fetch_add((p), (v), __ATOMIC_RELAXED))
#define shm_add_sc(p, v) __atomic_fetch_add((p), (v), __ATOMIC_SEQ_CST)
#define shm_sub_sc(p, v) __atomic_fetch_sub((p), (v), __ATOMIC_SEQ_CST)
/* A counter that only the loop writes needs no locked instruction. */
#define shm_bump(p, v) shm_store((p), shm_load(p) + (v))

/* ---- cards: what travels in hxa_card.data ---------------------------------------------------------------------------- */

typedef struct shm_link_card {
    uint32_t pid;                      /* first, by the rule of HXA_CAP_SAME_HOST; 0: unknown */
    uint32_t magic;
    uint32_t version;
    uint32_t capacity;                 /* of the ring in the segment */
    uint64_t token;                    /* what the peer must find at token_at if it can read our memory */
    uint64_t token_at;
} shm_link_card;

typedef struct shm_mem_card {
    uint32_t magic;
    uint32_t version;
    uint32_t kind;                     /* SHM_OWNED: one descriptor; SHM_REGISTERED: none */
    uint32_t rights;
    uint64_t size;
    uint64_t address;                  /* SHM_REGISTERED: in the owner's address space */
} shm_mem_card;

enum { SHM_VERSION = 1, SHM_LINK_MAGIC = 0x4b4e4c53, SHM_MEM_MAGIC = 0x4d454d53, SHM_HALF_MAGIC = 0x464c4853 };

/* ---- the shared half: made by one side (the owner), written by the other (the producer) ------------------------------ */

typedef struct shm_half {
    /* Hardly ever written, so that every submit reads it from its own cache. */
    uint32_t magic;
    uint32_t capacity;
    uint32_t fence;                    /* owner -> producer: stop touching my memory */
    /* The producer's. */
    _Alignas(SHM_LINE) uint64_t head;  /* bytes of records ever published */
    uint64_t signals;                  /* signals ever stored into the owner's memory */
    uint32_t want_space;               /* ring my bell when tail moves; the owner clears it */
    uint32_t fenced;                   /* the answer to fence */
    uint32_t gone;                     /* I stopped the link: I shall never touch your memory again */
    /* The owner's. */
    _Alignas(SHM_LINE) uint64_t tail;  /* bytes of records ever consumed */
    /* Both: the owner sets it before it sleeps, who rings its bell clears it. */
    _Alignas(SHM_LINE) uint32_t armed;
} shm_half;

_Static_assert(sizeof(shm_half) <= SHM_PAGE, "the header of a half is one page");

static inline uint8_t *shm_half_ring(shm_half *half) { return (uint8_t *)half + SHM_PAGE; }

/* ---- objects --------------------------------------------------------------------------------------------------------- */

enum { SHM_OWNED = 1, SHM_REGISTERED = 2, SHM_MAPPED = 3, SHM_REMOTE = 4 };

struct hxa_mem {
    hxa_instance *self;
    hxa_mem *next, *prev;              /* all memories of the instance, for after_fork */
    hxa_link *link;                    /* imported: whose; compared only, it may be gone */
    uint8_t *base;                     /* where it lies here; SHM_REMOTE: in the peer */
    uint64_t size;                     /* bytes that may be used */
    uint64_t mapped;                   /* bytes of address space to unmap, 0: none */
    uint32_t kind;                     /* SHM_OWNED or SHM_REGISTERED: ours; SHM_MAPPED or SHM_REMOTE: a peer's */
    uint32_t rights;                   /* the most that was, or may be, granted */
    int fd;                            /* SHM_OWNED: the segment */
};

enum { SHM_NEW = 0, SHM_UP = 1, SHM_DOWN = 2, SHM_STOPPED = 3 };

struct hxa_link {
    /* What submit reads. */
    uint32_t state;                    /* atomic; only grows */
    uint32_t flight;                   /* atomic: chunks and signals being written into the peer's memory by threads */
    shm_half *peer;                    /* the half that we write to */
    hxa_instance *self;
    uint64_t note_bytes;               /* most of a notification that both sides allow */
    int bell;                          /* write end of our pipe */
    int peer_bell;                     /* read end of the peer's */

    shm_half *own;                     /* the half that the peer writes to */
    uint64_t cookie;
    hxa_link *next, *prev;             /* all links of the instance, for after_fork */
    uint32_t refs;                     /* atomic: 1 until stopped, and one per accepted op */
    uint32_t capacity, peer_capacity;  /* of the rings, private copies */
    int bell_read;                     /* our own copy of the passed read end: no SIGPIPE while it is open */
    int pidfd;                         /* the peer's process, or -1 */
    int32_t peer_pid;
    int32_t vm_errno;                  /* why process_vm_* can't reach the peer; 0: it can */
    uint64_t pace;                     /* atomic: most bytes per second, 0: any */
    uint64_t free_at;                  /* when its next chunk may begin, in ns; under the threads' mutex */

    /* Receiving; the loop's. */
    uint64_t tail;                     /* private: what the half says is for the producer */
    uint64_t signals_seen;
    uint8_t more;                      /* the last poll left work behind */
    int8_t bell_end;                   /* SHM_BELL_CLOSED or SHM_BELL_FAULTY: the peer's bell rings no more */
    uint32_t down;                     /* atomic: LINK_DOWN was reported */

    /* Sending; see notes.c. */
    uint32_t busy;                     /* atomic: 0 free; else somebody appends, and others asked meanwhile */
    uint32_t waiting_n;                /* atomic: accepted ops with a notification that is not sent yet */
    uint32_t starved;                  /* atomic: a notification waits for room */
    uint32_t scrub;                    /* atomic: one that waits was cancelled */
    hxa_op *incoming;                  /* atomic stack */
    hxa_op *waiting, *waiting_last;    /* first in, first out; of who made busy non-zero */
    uint64_t head;                     /* likewise */
    uint64_t tail_seen;                /* likewise, and peeked at by the loop */

    hxa_op *stops;                     /* atomic stack of link_stop ops; see link.c for its end */
    hxa_op *fence;                     /* link_fence; the loop's */
    uint32_t fenced;                   /* atomic: 1 the peer fenced us, 2 and we told it that it can rely on that */
    uint32_t dead;                     /* the caller's word; the loop's */
};

/* One accepted op, in its scratch words. */
typedef struct shm_job {
    hxa_op *next;                      /* in one list at a time */
    hxa_link *link;
    const void *what;                  /* hxa_batch, or hxa_mem being imported */
    uint64_t offset;                   /* the next byte of descriptor `index`, or of the memory */
    uint32_t index;
    uint32_t state;                    /* atomic: SHM_CANCELLED, SHM_FINAL */
    uint32_t flight;                   /* chunks being copied; under the threads' mutex */
    uint16_t kind;                     /* SHM_COPY, SHM_IMPORT */
    uint16_t queued;                   /* in a queue of the pool; under the threads' mutex */
} shm_job;

enum { SHM_CANCELLED = 1u, SHM_FINAL = 2u };
enum { SHM_COPY = 1, SHM_IMPORT = 2 };

_Static_assert(sizeof(shm_job) <= sizeof(((hxa_op *)0)->scratch), "a job fits into the scratch words");

static inline shm_job *shm_job_of(hxa_op *op) { return (shm_job *)(void *)op->scratch; }

typedef struct shm_queue { hxa_op *first, *last; } shm_queue;

typedef struct shm_pool {
    hxa_op *incoming;                  /* atomic stack, pushed by the loop */
    uint32_t epoch;                    /* atomic: what sleepers wait on */
    uint32_t sleepers;                 /* atomic */
    uint32_t backlog;                  /* atomic: ops are queued that may begin */
    uint32_t looking;                  /* atomic: an idle thread looks for work without sleeping */
    uint32_t may_look;                 /* there is more than one CPU */
    uint32_t purge;                    /* atomic: some op was cancelled, or some link stopped */
    uint32_t stopping;                 /* atomic */
    uint32_t started;                  /* threads; the loop's */
    uint32_t limit;                    /* most threads */
    pthread_t threads[SHM_THREADS_MAX];
    pthread_mutex_t lock;              /* among copy threads; the loop never takes it */
    shm_queue queues[3];               /* high, normal, low; under lock */
    uint32_t turn;                     /* picks so far; under lock */
    uint64_t due;                      /* when the next op of a link with a limit may begin, in ns, 0: none; under lock */
} shm_pool;

struct hxa_instance {
    hxa_sink sink;
    uint64_t inline_bytes, chunk_bytes, stream_bytes, note_bytes;
    uint32_t capacity;                 /* of a ring */
    uint32_t waiting_limit;            /* most notifications of a link that may wait for room */
    uint32_t nowait;                   /* preadv2(RWF_NOWAIT) works on pipes */
    uint64_t token;
    hxa_link *links;
    hxa_mem *memories;
    uint8_t *text;                     /* one notification, private, while poll hands it out */
    hxa_stats loop;                    /* written by the loop only, and all gauges */
    hxa_stats others;                  /* written by any thread, with locked adds */
    shm_pool pool;
};

/* ---- segment.c ------------------------------------------------------------------------------------------------------- */

SHM_INTERNAL int shm_segment_create(const char *name, uint64_t bytes, int *fd);
SHM_INTERNAL int shm_segment_seal(int fd, int read_only);
SHM_INTERNAL int shm_segment_check(int fd, uint64_t bytes, uint64_t *actual);
SHM_INTERNAL int shm_segment_map(int fd, uint64_t bytes, uint8_t **base);
SHM_INTERNAL int shm_segment_map_peer(int fd, uint64_t bytes, int writable, uint8_t **base);
SHM_INTERNAL void shm_segment_unmap(uint8_t *base, uint64_t bytes);
SHM_INTERNAL void shm_segment_unmap_peer(uint8_t *base, uint64_t bytes);
SHM_INTERNAL int shm_segment_populate(uint8_t *base, uint64_t bytes, int writable);
SHM_INTERNAL int shm_segment_reader(int fd, int *reader);
SHM_INTERNAL void shm_close_foreign(int fd);
SHM_INTERNAL void shm_close_card(const hxa_card *card);
SHM_INTERNAL uint64_t shm_pages(uint64_t bytes);

/* ---- memory.c -------------------------------------------------------------------------------------------------------- */

SHM_INTERNAL int shm_mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem, void **address);
SHM_INTERNAL int shm_mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights,
                                  hxa_mem **mem);
SHM_INTERNAL int shm_mem_export(hxa_mem *mem, uint32_t rights, hxa_card *card);
SHM_INTERNAL int shm_mem_import(hxa_link *link, const hxa_card *card, uint64_t size, uint32_t rights, hxa_mem **mem,
                                hxa_op *op);
SHM_INTERNAL void shm_mem_release(hxa_mem *mem);

/* ---- doorbell.c ------------------------------------------------------------------------------------------------------ */

enum { SHM_BELL_CLOSED = -1, SHM_BELL_FAULTY = -2 };

SHM_INTERNAL int shm_bell_new(int *write_end, int *read_end);
SHM_INTERNAL uint32_t shm_bell_nowait(void);
SHM_INTERNAL int shm_bell_adopt(int *fd, uint32_t nowait);
SHM_INTERNAL int shm_bell_ring(int fd);
SHM_INTERNAL ssize_t shm_bell_clear(int fd, uint32_t nowait);

/* ---- ring.c ---------------------------------------------------------------------------------------------------------- */

enum { SHM_RING_FULL = 0, SHM_RING_EMPTY = 0, SHM_RING_OK = 1, SHM_RING_CORRUPT = -1 };

SHM_INTERNAL int shm_ring_room(shm_half *half, uint32_t capacity, uint64_t head, uint64_t *tail_seen, uint64_t payload);
SHM_INTERNAL void shm_ring_put(shm_half *half, uint32_t capacity, uint64_t *head, const void *topic, uint32_t topic_len,
                               const void *note, uint32_t note_len);
SHM_INTERNAL int shm_ring_get(shm_half *half, uint32_t capacity, uint64_t *tail, uint64_t head, uint64_t note_bytes,
                              uint8_t *text, uint32_t *topic_len, uint32_t *note_len);

/* ---- link.c ---------------------------------------------------------------------------------------------------------- */

SHM_INTERNAL int shm_link_new(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_card *card);
SHM_INTERNAL int shm_link_connect(hxa_link *link, const hxa_card *card, hxa_op *op);
SHM_INTERNAL int shm_link_fd(hxa_link *link);
SHM_INTERNAL int shm_link_stop(hxa_link *link, int dead, hxa_op *op);
SHM_INTERNAL int shm_link_fence(hxa_link *link, hxa_op *op);
SHM_INTERNAL void shm_link_free(hxa_link *link);
SHM_INTERNAL int shm_poll(hxa_link *link, uint32_t budget);
SHM_INTERNAL void shm_link_wake(hxa_link *link);
SHM_INTERNAL void shm_link_break(hxa_link *link, int32_t status, const char *why);
SHM_INTERNAL void shm_link_unref(hxa_link *link);
SHM_INTERNAL int shm_link_enter(hxa_link *link);
SHM_INTERNAL void shm_link_leave(hxa_link *link);

/* May something of ours still be written into the peer's memory? */
static inline int shm_link_open(const hxa_link *link) {
    return shm_load_acq(&link->state) == SHM_UP && shm_load_acq(&link->peer->fence) == 0;
}

/* ---- notes.c --------------------------------------------------------------------------------------------------------- */

SHM_INTERNAL int shm_notes_send(hxa_link *link, const hxa_batch *batch, hxa_op *op);
SHM_INTERNAL void shm_notes_queue(hxa_link *link, hxa_op *op);
SHM_INTERNAL void shm_notes_pump(hxa_link *link);
SHM_INTERNAL int shm_notes_ready(hxa_link *link);

/* ---- copy.c ---------------------------------------------------------------------------------------------------------- */

typedef struct shm_outcome { int32_t status, native; uint32_t scope; int64_t failed; uint64_t bytes; } shm_outcome;

SHM_INTERNAL int shm_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op);
SHM_INTERNAL int shm_cancel(hxa_link *link, hxa_op *op);
SHM_INTERNAL uint64_t shm_progress(hxa_link *link, const hxa_op *op);
SHM_INTERNAL void shm_copy(hxa_link *link, const hxa_batch *batch, uint32_t index, uint64_t offset, uint64_t bytes,
                           shm_outcome *out);
SHM_INTERNAL int32_t shm_signal_store(hxa_link *link, const hxa_batch *batch, shm_outcome *out);
SHM_INTERNAL int shm_vm_probe(hxa_link *link, const shm_link_card *card);
SHM_INTERNAL void shm_op_accept(hxa_op *op, hxa_link *link, const void *what, uint16_t kind);
SHM_INTERNAL void shm_op_finish(hxa_op *op);
SHM_INTERNAL int32_t shm_op_decide(hxa_op *op);
SHM_INTERNAL void shm_op_landed(hxa_op *op);

/* ---- workers.c ------------------------------------------------------------------------------------------------------- */

SHM_INTERNAL int shm_pool_open(shm_pool *pool, uint32_t limit);
SHM_INTERNAL void shm_pool_close(hxa_instance *self);
SHM_INTERNAL int shm_pool_ready(hxa_instance *self, uint64_t chunks);
SHM_INTERNAL void shm_pool_push(hxa_instance *self, hxa_op *op);
SHM_INTERNAL void shm_pool_purge(hxa_instance *self);
SHM_INTERNAL int shm_waits(hxa_link *link, const hxa_op *op);
SHM_INTERNAL int shm_link_pace(hxa_link *link, uint64_t bytes_per_second);
SHM_INTERNAL int shm_mem_borrow(hxa_link *link, hxa_mem *mem, void **address);
SHM_INTERNAL void shm_mem_return(hxa_link *link, hxa_mem *mem);

/* ---- lists ----------------------------------------------------------------------------------------------------------- */

static inline void shm_stack_push(hxa_op **stack, hxa_op *op) {
    hxa_op *top = shm_load(stack);
    do shm_job_of(op)->next = top;
    while (!__atomic_compare_exchange_n(stack, &top, op, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
}

/* Everything on the stack, oldest first. */
static inline hxa_op *shm_stack_take(hxa_op **stack) {
    hxa_op *op = __atomic_exchange_n(stack, NULL, __ATOMIC_SEQ_CST), *first = NULL;
    while (op != NULL) {
        hxa_op *next = shm_job_of(op)->next;
        shm_job_of(op)->next = first;
        first = op;
        op = next;
    }
    return first;
}

#endif /* HXA_SHM_H */
