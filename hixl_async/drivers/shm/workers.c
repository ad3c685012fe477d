/* Copy threads: they take turns on all queued ops, one chunk at a time, several on one op if it is large.
 *
 * The loop pushes ops on a stack and wakes; all else is between the threads, under their mutex.  A mutex holder walks at most
 * SHM_CHUNK_DESCRIPTORS descriptors; copies, posts and wake-ups happen outside of it.
 */
#include "shm.h"

#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    POPULATE_CHUNK = 256 << 10,        /* populating holds up mmap and munmap on the loop */
    LOWEST_FIRST_EVERY = 8             /* so that nothing starves */
};

typedef struct chunk { hxa_op *op; uint32_t index; uint64_t offset, bytes; } chunk;

/* ---- queues; under the mutex ----------------------------------------------------------------------------------------- */

static void queue_push(shm_queue *queue, hxa_op *op) {
    shm_job_of(op)->next = NULL;
    if (queue->first == NULL) queue->first = op;
    else shm_job_of(queue->last)->next = op;
    queue->last = op;
    shm_job_of(op)->queued = 1;
}

static hxa_op *queue_pop(shm_queue *queue) {
    hxa_op *op = queue->first;
    if (op != NULL) {
        queue->first = shm_job_of(op)->next;
        shm_job_of(op)->queued = 0;
    }
    return op;
}

static void queue_remove(shm_queue *queue, hxa_op *op) {
    hxa_op *before = NULL;
    for (hxa_op *at = queue->first; at != op; at = shm_job_of(at)->next) before = at;
    if (before == NULL) queue->first = shm_job_of(op)->next;
    else shm_job_of(before)->next = shm_job_of(op)->next;
    if (queue->last == op) queue->last = before;
    shm_job_of(op)->queued = 0;
}

static shm_queue *queue_of(shm_pool *pool, const hxa_op *op) {
    const shm_job *job = (const shm_job *)(const void *)op->scratch;
    const int32_t priority = job->kind == SHM_COPY ? ((const hxa_batch *)job->what)->priority : HXA_PRIORITY_NORMAL;
    return &pool->queues[priority > HXA_PRIORITY_NORMAL ? 0 : priority < HXA_PRIORITY_NORMAL ? 2 : 1];
}

static hxa_op *pick(shm_pool *pool) {
    const int lowest_first = ++pool->turn % LOWEST_FIRST_EVERY == 0;
    hxa_op *op = NULL;
    for (int i = 0; i < 3 && op == NULL; i++) op = queue_pop(&pool->queues[lowest_first ? 2 - i : i]);
    return op;
}

/* Why no further chunk of the op may start, or 0. */
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

/* Takes every op that must not go on out of the queues; those without running chunks are chained to *ended. */
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
            if (shm_job_of(op)->flight != 0) continue;
            shm_job_of(op)->next = *ended;
            *ended = op;
        }
    }
}

/* The next chunk of a picked op, which goes back to the end of its queue if there is more. */
static chunk carve(hxa_instance *self, hxa_op *op) {
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
        for (uint32_t n = 0; n < SHM_CHUNK_DESCRIPTORS && job->index < batch->n && cut.bytes < self->chunk_bytes; n++) {
            const uint64_t rest = batch->desc[job->index].len - job->offset, space = self->chunk_bytes - cut.bytes;
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
    }
    job->flight++;
    if (more) queue_push(queue_of(&self->pool, op), op);
    return cut;
}

/* ---- threads --------------------------------------------------------------------------------------------------------- */

static long futex(uint32_t *word, int operation, uint32_t value) {
    return syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

static void run_chunk(const chunk *cut, shm_outcome *out) {
    const shm_job *job = shm_job_of(cut->op);
    *out = (shm_outcome){.failed = -1};
    if (job->kind == SHM_IMPORT) {
        const hxa_mem *mem = (const hxa_mem *)job->what;
        const int error = shm_segment_populate(mem->base + cut->offset, cut->bytes, (mem->rights & HXA_RIGHT_WRITE) != 0);
        if (error == 0) out->bytes = cut->bytes;
        else *out = (shm_outcome){.status = error == ENOMEM ? HXA_E_NOMEM : HXA_E_SYSTEM, .native = error, .failed = -1};
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

/* A chunk is over.  Answers 1 for the last one of an op that goes no further. */
static int account(shm_pool *pool, hxa_op *op, const shm_outcome *out) {
    shm_job *job = shm_job_of(op);
    shm_store(&op->bytes, shm_load(&op->bytes) + out->bytes);
    if (out->status != 0 && op->status == 0) {
        op->status = out->status;
        op->native = out->native;
        op->scope = out->scope;
        op->failed = out->failed;
    }
    job->flight--;
    if (op->status != 0 && job->queued) queue_remove(queue_of(pool, op), op);
    return job->flight == 0 && !job->queued;
}

/* Dekker: we say that we sleep, then look; who makes work stores it, then looks for sleepers. */
static void rest(shm_pool *pool) {
    const uint32_t epoch = shm_load_sc(&pool->epoch);
    shm_add_sc(&pool->sleepers, 1u);
    if (shm_load_sc(&pool->incoming) == NULL && shm_load_sc(&pool->backlog) == 0 && shm_load_sc(&pool->purge) == 0
        && shm_load_sc(&pool->stopping) == 0)
        futex(&pool->epoch, FUTEX_WAIT_PRIVATE, epoch);
    shm_sub_sc(&pool->sleepers, 1u);
}

static void wake(shm_pool *pool, uint32_t most) {
    if (shm_load_sc(&pool->sleepers) == 0) return;
    shm_add_sc(&pool->epoch, 1u);
    futex(&pool->epoch, FUTEX_WAKE_PRIVATE, most);
}

static void *work(void *arg) {
    hxa_instance *self = (hxa_instance *)arg;
    shm_pool *pool = &self->pool;
    while (shm_load_sc(&pool->stopping) == 0) {
        hxa_op *ended = NULL;
        chunk cut = {0};
        pthread_mutex_lock(&pool->lock);
        for (hxa_op *op = shm_stack_take(&pool->incoming), *next; op != NULL; op = next) {
            next = shm_job_of(op)->next;
            queue_push(queue_of(pool, op), op);
        }
        if (shm_swap_sc(&pool->purge, 0u) != 0) purge(pool, &ended);
        hxa_op *op = pick(pool);
        if (op != NULL) cut = carve(self, op);
        const shm_queue *queues = pool->queues;
        const uint32_t backlog = queues[0].first != NULL || queues[1].first != NULL || queues[2].first != NULL;
        shm_store_sc(&pool->backlog, backlog);
        pthread_mutex_unlock(&pool->lock);
        if (backlog) wake(pool, 1);    /* each thread that finds more than it can do calls another */
        for (hxa_op *next; ended != NULL; ended = next) {
            next = shm_job_of(ended)->next;
            shm_op_landed(ended);
        }
        if (op == NULL) {
            rest(pool);
            continue;
        }
        shm_outcome out;
        run_chunk(&cut, &out);
        pthread_mutex_lock(&pool->lock);
        const int last = account(pool, op, &out);
        pthread_mutex_unlock(&pool->lock);
        if (last) shm_op_landed(op);
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
    if (error != 0) return -HXA_E_NOMEM;
    snprintf(name, sizeof name, "hixl-shm-%u", pool->started);
    pthread_setname_np(pool->threads[pool->started], name);
    pool->started++;
    shm_bump(&self->loop.threads, 1);
    return 0;
}

/* Before work of that many chunks is accepted: enough threads, or at least one. */
int shm_pool_ready(hxa_instance *self, uint64_t chunks) {
    shm_pool *pool = &self->pool;
    while (pool->started < pool->limit && (pool->started < chunks || shm_load_sc(&pool->sleepers) == 0)) {
        const int status = start(self);
        if (status != 0) return pool->started != 0 ? 0 : status;
        if (pool->started >= chunks) break;
    }
    return 0;
}

void shm_pool_push(hxa_instance *self, hxa_op *op) {
    shm_stack_push(&self->pool.incoming, op);
    wake(&self->pool, 1);
}

/* Some op must not go on: let a thread look for it. */
void shm_pool_purge(hxa_instance *self) {
    shm_store_sc(&self->pool.purge, 1u);
    wake(&self->pool, 1);
}

int shm_pool_open(shm_pool *pool, uint32_t limit) {
    pool->limit = limit;
    return pthread_mutex_init(&pool->lock, NULL) == 0 ? 0 : -HXA_E_NOMEM;
}

void shm_pool_close(hxa_instance *self) {
    shm_pool *pool = &self->pool;
    shm_store_sc(&pool->stopping, 1u);
    wake(pool, INT_MAX);
    for (uint32_t i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    shm_store(&self->loop.threads, 0);
    pthread_mutex_destroy(&pool->lock);
}
