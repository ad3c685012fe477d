#include "workers.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>

#include "copy.h"
#include "doorbell.h"
#include "notes.h"
#include "op.h"
#include "region.h"
#include "segment.h"

enum {
    POPULATE_CHUNK = 256 << 10,        /* populating holds up mmap and munmap on the loop */
    CHUNK_DESCRIPTORS = 4096,          /* most in one chunk of a copy */
    LOWEST_FIRST_EVERY = 8,            /* so that nothing starves */
    SMALL_BYTES = 16 << 10,            /* ops of at most this many bytes, */
    SMALL_DESCRIPTORS = 64,            /* and at most this many descriptors, are taken several at a time */
    TURN = 16,                         /* most chunks of one turn at the mutex */
    PACES_PER_SECOND = 100,            /* a link with a limit moves at most 1/100 of a second's bytes at once */
    CATCH_UP_NS = 1000000000 / PACES_PER_SECOND
};

typedef struct chunk { hxa_op *op; uint32_t index; uint64_t offset, bytes; } chunk;

/* ---- queues; under the mutex ----------------------------------------------------------------------------------------- */

static void queue_push(shm_queue *queue, hxa_op *op) {
    shm_queue_push(queue, op);
    shm_job_of(op)->queued = 1;
}

static void queue_remove(shm_queue *queue, hxa_op *op) {
    shm_queue_remove(queue, op);
    shm_job_of(op)->queued = 0;
}

static shm_queue *queue_of(shm_pool *pool, const hxa_op *op) {
    const shm_job *job = shm_job_seen(op);
    const int32_t priority = job->kind == SHM_COPY ? ((const hxa_batch *)job->what)->priority : HXA_PRIORITY_NORMAL;
    return &pool->queues[priority > HXA_PRIORITY_NORMAL ? 0 : priority < HXA_PRIORITY_NORMAL ? 2 : 1];
}

/* Return 1 if the bandwidth limit of its link forbids more for now; the pool looks again when that ends. */
static int held_back(shm_pool *pool, hxa_op *op, uint64_t *now) {
    const shm_job *job = shm_job_of(op);
    if (job->kind != SHM_COPY || shm_load(&job->link->pace) == 0) return 0;
    if (*now == 0) *now = shm_now_ns();
    if (job->link->free_at <= *now) return 0;
    if (pool->due == 0 || job->link->free_at < pool->due) pool->due = job->link->free_at;
    return 1;
}

static int is_small(const hxa_op *op) {
    const shm_job *job = shm_job_seen(op);
    const hxa_batch *batch = (const hxa_batch *)job->what;
    return job->kind == SHM_COPY && batch->bytes <= SMALL_BYTES && batch->n <= SMALL_DESCRIPTORS;
}

/* Remove and return the next op; with `small`, return NULL if it is large. */
static hxa_op *pick(shm_pool *pool, int small, uint64_t *now) {
    const int lowest_first = (pool->turn + 1) % LOWEST_FIRST_EVERY == 0;
    for (int i = 0; i < 3; i++) {
        shm_queue *queue = &pool->queues[lowest_first ? 2 - i : i];
        for (hxa_op *op = queue->first; op != NULL; op = shm_job_of(op)->next) {
            if (held_back(pool, op, now)) continue;
            if (small && !is_small(op)) return NULL;
            pool->turn++;
            queue_remove(queue, op);
            return op;
        }
    }
    return NULL;
}

/* Return the status that keeps further chunks of the op from starting, or 0. */
static int32_t verdict(hxa_op *op) {
    const shm_job *job = shm_job_of(op);
    if (shm_load_sc(&job->state) & SHM_CANCELLED) return HXA_E_CANCELLED;
    return shm_link_open(job->link) && shm_load_sc(&job->link->fenced) == 0 ? 0 : HXA_E_LINK;
}

static void fail(hxa_op *op, int32_t status) {
    if (op->status != 0) return;
    op->status = status;
    op->scope = status == HXA_E_LINK ? HXA_SCOPE_LINK : HXA_SCOPE_OP;
}

/* Remove from the queues every op that must stop; those without running chunks are chained to *ended. */
static void purge(shm_pool *pool, hxa_op **ended) {
    for (int i = 0; i < 3; i++) {
        hxa_op *op = pool->queues[i].first;
        pool->queues[i].first = NULL;
        for (hxa_op *next; op != NULL; op = next) {
            next = shm_job_of(op)->next;
            shm_job_of(op)->queued = 0;
            const int32_t why = op->status != 0 ? op->status : verdict(op);
            if (why == 0) {
                queue_push(&pool->queues[i], op);
                continue;
            }
            fail(op, why);
            if (shm_job_of(op)->in_flight != 0) continue;
            shm_job_of(op)->next = *ended;
            *ended = op;
        }
    }
}

/* The next chunk of a picked op, which goes back to the end of its queue if there is more. */
static chunk carve(hxa_instance *self, hxa_op *op, uint64_t now) {
    shm_job *job = shm_job_of(op);
    chunk cut = {.op = op, .index = job->index, .offset = job->offset};
    int more;
    if (job->kind == SHM_IMPORT) {
        const uint64_t rest = ((const hxa_mem *)job->what)->mapped - job->offset;
        cut.bytes = rest < POPULATE_CHUNK ? rest : POPULATE_CHUNK;
        job->offset += cut.bytes;
        more = cut.bytes < rest;
    } else {
        const hxa_batch *batch = (const hxa_batch *)job->what;
        const uint64_t pace = shm_load(&job->link->pace);
        uint64_t most = self->chunk_bytes;
        if (pace != 0 && pace / PACES_PER_SECOND < most) most = pace / PACES_PER_SECOND + 1;
        for (uint32_t n = 0; n < CHUNK_DESCRIPTORS && job->index < batch->n && cut.bytes < most; n++) {
            const uint64_t rest = batch->desc[job->index].len - job->offset, space = most - cut.bytes;
            if (rest > space) {
                job->offset += space;
                cut.bytes += space;
            } else {
                job->index++;
                job->offset = 0;
                cut.bytes += rest;
            }
        }
        more = job->index < batch->n;
        if (pace != 0) {
            /* A thread that came late catches up; what an idle link did not use before that is lost. */
            if (job->link->free_at + CATCH_UP_NS < now) job->link->free_at = now - CATCH_UP_NS;
            job->link->free_at += (uint64_t)((double)cut.bytes * 1e9 / (double)pace);
        }
    }
    job->in_flight++;
    if (more) queue_push(queue_of(&self->pool, op), op);
    return cut;
}

/* ---- threads --------------------------------------------------------------------------------------------------------- */

static void run_chunk(const chunk *cut, shm_outcome *out) {
    const shm_job *job = shm_job_of(cut->op);
    *out = (shm_outcome){.failed = -1};
    if (job->kind == SHM_IMPORT) {
        const hxa_mem *mem = (const hxa_mem *)job->what;
        const int error = shm_segment_populate(mem->base + cut->offset, cut->bytes, (mem->rights & HXA_RIGHT_WRITE) != 0);
        if (error == 0) out->bytes = cut->bytes;
        else *out = (shm_outcome){.status = hxa_refusal_status(shm_refusal_of(error)), .native = error, .failed = -1};
        return;
    }
    if (shm_load_sc(&job->state) & SHM_CANCELLED) {
        out->status = HXA_E_CANCELLED;
    } else if (!shm_link_enter(job->link)) {
        out->status = HXA_E_LINK;
        out->scope = HXA_SCOPE_LINK;
    } else {
        shm_copy(job->link, (const hxa_batch *)job->what, cut->index, cut->offset, cut->bytes, out);
        shm_link_leave(job->link);
    }
}

/* A chunk is over.  Return 1 for the last one of an op that goes no further. */
static int account(shm_pool *pool, hxa_op *op, const shm_outcome *out) {
    shm_job *job = shm_job_of(op);
    shm_store(&op->bytes, shm_load(&op->bytes) + out->bytes);
    if (out->status != 0 && op->status == 0) {
        op->status = out->status;
        op->native = out->native;
        op->scope = out->scope;
        op->failed = out->failed;
    }
    job->in_flight--;
    if (op->status != 0 && job->queued) queue_remove(queue_of(pool, op), op);
    return job->in_flight == 0 && !job->queued;
}

/* All chunks of the op are joined: its signal, its notification, its end.  op->status says whether the data arrived. */
static void landed(hxa_op *op) {
    shm_job *job = shm_job_of(op);
    hxa_link *link = job->link;
    const hxa_batch *batch = job->kind == SHM_COPY ? (const hxa_batch *)job->what : NULL;
    if (batch != NULL) {
        hxa_stats *stats = &link->self->others;
        shm_add(batch->verb == HXA_READ ? &stats->bytes_read : &stats->bytes_written, op->bytes);
    }
    if (op->status == 0 && batch != NULL && batch->signal != NULL) {
        if (!shm_link_enter(link)) {
            op->status = HXA_E_LINK;
            op->scope = HXA_SCOPE_LINK;
        } else {
            op->status = shm_op_decide(op);
            shm_outcome out;
            if (op->status == 0 && shm_signal_store(link, batch, &out) != 0) {
                op->status = out.status;
                op->native = out.native;
                op->scope = out.scope;
            }
            shm_link_leave(link);
            shm_bell_wake(link);
        }
    }
    if (op->status == 0 && batch != NULL && batch->topic != NULL) {
        shm_notes_queue(link, op);
        return;
    }
    const int32_t decided = shm_op_decide(op);
    if (op->status == 0) op->status = decided;
    shm_op_finish(op);
}

static void *work(void *arg) {
    hxa_instance *self = (hxa_instance *)arg;
    shm_pool *pool = &self->pool;
    /* A thread that wakes must not push the loop off its CPU: the loop has more to submit. */
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &(struct sched_param){0});
    uint64_t waited = UINT64_MAX;
    while (shm_load_sc(&pool->stopping) == 0) {
        hxa_op *ended = NULL;
        chunk cuts[TURN];
        int last[TURN], n = 0;
        uint64_t now = 0;
        pthread_mutex_lock(&pool->lock);
        for (hxa_op *op = shm_stack_take(&pool->incoming), *next; op != NULL; op = next) {
            next = shm_job_of(op)->next;
            queue_push(queue_of(pool, op), op);
        }
        if (shm_swap_sc(&pool->purge, 0u) != 0) purge(pool, &ended);
        pool->due = 0;
        for (hxa_op *op; n < TURN && (op = pick(pool, n != 0, &now)) != NULL; n++) {
            cuts[n] = carve(self, op, now);
            if (!is_small(op)) {
                n++;
                break;
            }
        }
        const shm_queue *queues = pool->queues;
        const uint32_t queued = queues[0].first != NULL || queues[1].first != NULL || queues[2].first != NULL;
        const uint32_t ready = queued && n != 0;     /* what is queued although we took nothing has to wait for its time */
        const uint64_t due = n == 0 ? pool->due : 0;
        shm_store_sc(&pool->ready, ready);
        pthread_mutex_unlock(&pool->lock);
        if (ready) shm_pool_call(pool);      /* each thread that finds more than it can do calls another */
        for (hxa_op *next; ended != NULL; ended = next) {
            next = shm_job_of(ended)->next;
            landed(ended);
        }
        if (n == 0) {
            shm_pool_idle(pool, due, &waited);
            continue;
        }
        shm_outcome out[TURN];
        for (int i = 0; i < n; i++) run_chunk(&cuts[i], &out[i]);
        pthread_mutex_lock(&pool->lock);
        for (int i = 0; i < n; i++) last[i] = account(pool, cuts[i].op, &out[i]);
        pthread_mutex_unlock(&pool->lock);
        for (int i = 0; i < n; i++)
            if (last[i]) landed(cuts[i].op);
    }
    return NULL;
}

/* ---- the loop's side ------------------------------------------------------------------------------------------------- */

static int start(hxa_instance *self) {
    shm_pool *pool = &self->pool;
    sigset_t all, before;
    char name[16];
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);       /* signals are for the threads of the program */
    const int error = pthread_create(&pool->threads[pool->started], NULL, work, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) return HXA_REFUSAL(HXA_E_NOMEM, error);
    snprintf(name, sizeof name, "hixl-shm-%u", pool->started);
    pthread_setname_np(pool->threads[pool->started], name);
    pool->started++;
    shm_bump(&self->loop.threads, 1);
    return 0;
}

int shm_workers_ready(hxa_instance *self, uint64_t bytes, uint64_t descriptors) {
    const uint64_t chunks = bytes / self->chunk_bytes + descriptors / CHUNK_DESCRIPTORS + 1;
    shm_pool *pool = &self->pool;
    while (pool->started < pool->limit && (pool->started < chunks || shm_load_sc(&pool->sleepers) == 0)) {
        const int status = start(self);
        if (status != 0) return pool->started != 0 ? 0 : status;
        if (pool->started >= chunks) break;
    }
    return 0;
}

int shm_waits(hxa_link *link, const hxa_op *op) {
    shm_pool *pool = &link->self->pool;
    const shm_job *job = shm_job_seen(op);
    pthread_mutex_lock(&pool->lock);
    const int waits = job->queued && job->in_flight == 0;
    pthread_mutex_unlock(&pool->lock);
    return waits;
}
