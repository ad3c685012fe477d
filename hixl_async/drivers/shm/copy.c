/* Moving bytes.  Small batches are copied by the loop inside submit; larger ones go to the copy threads (workers.c). */
#include "shm.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

enum {
    DESCRIPTOR_COST = 64,              /* what a descriptor costs the loop, in bytes that it could copy instead */
    STREAM_LEAST = 1024,               /* bytes of a piece for which streaming stores are worth their fence */
    VM_PIECES = 64                     /* descriptors per process_vm_* call */
};

/* ---- ops ------------------------------------------------------------------------------------------------------------- */

static int has_note(const shm_job *job) { return job->kind == SHM_COPY && ((const hxa_batch *)job->what)->topic != NULL; }

/* The loop: from here on T4 applies. */
void shm_op_accept(hxa_op *op, hxa_link *link, const void *what, uint16_t kind) {
    op->status = op->native = 0;
    op->scope = HXA_SCOPE_OP;
    op->failed = -1;
    shm_store(&op->bytes, 0);
    *shm_job_of(op) = (shm_job){.link = link, .what = what, .kind = kind};
    shm_add_sc(&link->refs, 1u);
    if (has_note(shm_job_of(op))) shm_add_sc(&link->waiting_n, 1u);
    shm_bump(&link->self->loop.ops_queued, 1);
}

/* Completion and release in one; the op is the core's again, and the link may go. */
void shm_op_finish(hxa_op *op) {
    hxa_link *link = shm_job_of(op)->link;
    if (has_note(shm_job_of(op))) shm_sub_sc(&link->waiting_n, 1u);
    hxa_finish(&link->self->sink, op);
    shm_link_unref(link);
}

/* The point where it is too late to cancel: 0, or HXA_E_CANCELLED if that came first. */
int32_t shm_op_decide(hxa_op *op) {
    const uint32_t before = __atomic_fetch_or(&shm_job_of(op)->state, SHM_FINAL, __ATOMIC_SEQ_CST);
    return before == SHM_CANCELLED ? HXA_E_CANCELLED : 0;
}

int shm_cancel(hxa_link *link, hxa_op *op) {
    if (__atomic_fetch_or(&shm_job_of(op)->state, SHM_CANCELLED, __ATOMIC_SEQ_CST) & SHM_FINAL) return 0;
    shm_pool_purge(link->self);
    if (has_note(shm_job_of(op))) {
        shm_store_sc(&link->scrub, 1u);
        shm_notes_pump(link);
    }
    return 1;
}

uint64_t shm_progress(hxa_link *link, const hxa_op *op) {
    (void)link;
    return shm_load(&op->bytes);
}

/* ---- memory that was registered where it lies: process_vm_* ---------------------------------------------------------- */

/* Does the process run as our user?  Another user's could make us wait at page faults of its making, even where we are root
 * and the kernel would let us in.  The owner of /proc/PID won't do: it is root for who made himself undumpable. */
static int same_user(pid_t pid) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    const int fd = HXA_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    const ssize_t got = fd < 0 ? -1 : HXA_RETRY(read(fd, text, sizeof text - 1));
    if (fd >= 0) close(fd);
    if (got <= 0) return 0;
    text[got] = '\0';
    const char *uids = strstr(text, "\nUid:");
    unsigned real, effective;
    return uids != NULL && sscanf(uids + 5, "%u %u", &real, &effective) == 2 && real == geteuid() && effective == geteuid();
}

/* Why process_vm_* can't reach the peer, as errno; 0: it can.  The core has checked the pid against the credentials of the
 * control connection; that the process holds the token of the card proves that the number means the same process here. */
int shm_vm_probe(hxa_link *link, const shm_link_card *card) {
    if (card->pid == 0 || card->pid > INT32_MAX) return ESRCH;
    if (!same_user((pid_t)card->pid)) return EPERM;
    const int pidfd = (int)syscall(SYS_pidfd_open, (pid_t)card->pid, 0u);
    if (pidfd < 0) return errno;
    uint64_t found = 0;
    struct iovec here = {&found, sizeof found}, there = {(void *)(uintptr_t)card->token_at, sizeof found};
    const ssize_t got = HXA_RETRY(process_vm_readv((pid_t)card->pid, &here, 1, &there, 1, 0));
    const int error = got < 0 ? errno : got != sizeof found || found != card->token ? ESRCH : 0;
    if (error != 0) {
        close(pidfd);
        return error;
    }
    link->peer_pid = (int32_t)card->pid;
    link->pidfd = pidfd;
    return 0;
}

static void vm_failed(shm_outcome *out, int error, uint32_t index) {
    out->native = error;
    out->failed = index;
    out->scope = HXA_SCOPE_OP;
    switch (error) {
    case EFAULT: out->status = HXA_E_RANGE; break;
    case EPERM: out->status = HXA_E_RIGHTS; break;
    case ENOMEM: out->status = HXA_E_NOMEM; break;
    case ESRCH: out->status = HXA_E_LINK; out->scope = HXA_SCOPE_LINK; break;
    default: out->status = HXA_E_SYSTEM;
    }
}

/* The number of a dead process may be that of another process by now. */
static int vm_alive(const hxa_link *link) {
    struct pollfd peer = {.fd = link->pidfd, .events = POLLIN};
    return HXA_RETRY(poll(&peer, 1, 0)) == 0;
}

/* The bytes that moved, or a negative errno; never 0. */
static ssize_t vm_move(const hxa_link *link, uint32_t verb, struct iovec *here, struct iovec *there, unsigned long n) {
    if (!vm_alive(link)) return -ESRCH;
    const ssize_t got = HXA_RETRY(verb == HXA_READ ? process_vm_readv(link->peer_pid, here, n, there, n, 0)
                                                   : process_vm_writev(link->peer_pid, here, n, there, n, 0));
    return got > 0 ? got : got == 0 ? -EFAULT : -errno;
}

static uint8_t *local_at(const hxa_desc *desc) {
    return desc->lmem != NULL ? desc->lmem->base + desc->loff : (uint8_t *)(uintptr_t)desc->loff;
}

/* ---- the copy -------------------------------------------------------------------------------------------------------- */

/* Past the caches: a batch that they can't hold anyway would fetch every target line only to overwrite it.  ARM cores notice
 * that by themselves, and memcpy sees single chunks only. */
static void stream(uint8_t *to, const uint8_t *from, uint64_t bytes) {
#ifdef __x86_64__
    const uint64_t head = -(uintptr_t)to & 63;
    if (bytes >= STREAM_LEAST) {
        memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
        for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
            const __m128i *source = (const __m128i *)(const void *)from;
            __m128i *target = (__m128i *)(void *)to;
            const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
        _mm_sfence();                  /* these stores are ordered by nothing else */
    }
#endif
    memcpy(to, from, bytes);
}

typedef struct cursor { uint32_t index; uint64_t offset, left; } cursor;

static uint64_t piece(const hxa_batch *batch, const cursor *at) {
    const uint64_t rest = batch->desc[at->index].len - at->offset;
    return rest < at->left ? rest : at->left;
}

static void advance(const hxa_batch *batch, cursor *at, uint64_t bytes) {
    at->left -= bytes;
    at->offset += bytes;
    if (at->offset == batch->desc[at->index].len) {
        at->index++;
        at->offset = 0;
    }
}

/* One call for the descriptors that follow and lie in such memory.  A short answer ends before the first byte that can't be
 * reached, so the next call tells why. */
static int vm_copy(hxa_link *link, const hxa_batch *batch, cursor *at, shm_outcome *out) {
    struct iovec here[VM_PIECES], there[VM_PIECES];
    unsigned long n = 0;
    for (cursor next = *at; n < VM_PIECES && next.left != 0 && batch->desc[next.index].rmem->kind == SHM_REMOTE; n++) {
        const hxa_desc *desc = &batch->desc[next.index];
        const uint64_t bytes = piece(batch, &next);
        here[n] = (struct iovec){local_at(desc) + next.offset, bytes};
        there[n] = (struct iovec){desc->rmem->base + desc->roff + next.offset, bytes};
        advance(batch, &next, bytes);
    }
    const ssize_t got = vm_move(link, batch->verb, here, there, n);
    if (got < 0) {
        vm_failed(out, (int)-got, at->index);
        return 0;
    }
    out->bytes += (uint64_t)got;
    for (uint64_t rest = (uint64_t)got; rest != 0;) {
        const uint64_t step = piece(batch, at) < rest ? piece(batch, at) : rest;
        advance(batch, at, step);
        rest -= step;
    }
    return 1;
}

/* `bytes` bytes of the batch, from byte `offset` of descriptor `index` on. */
void shm_copy(hxa_link *link, const hxa_batch *batch, uint32_t index, uint64_t offset, uint64_t bytes, shm_outcome *out) {
    const int large = batch->bytes >= link->self->stream_bytes;
    *out = (shm_outcome){.failed = -1};
    for (cursor at = {index, offset, bytes}; at.left != 0;) {
        const hxa_desc *desc = &batch->desc[at.index];
        if (desc->rmem->kind == SHM_REMOTE) {
            if (!vm_copy(link, batch, &at, out)) return;
            continue;
        }
        const uint64_t step = piece(batch, &at);
        uint8_t *here = local_at(desc) + at.offset, *there = desc->rmem->base + desc->roff + at.offset;
        uint8_t *to = batch->verb == HXA_READ ? here : there, *from = batch->verb == HXA_READ ? there : here;
        if (large) stream(to, from, step);
        else memcpy(to, from, step);
        out->bytes += step;
        advance(batch, &at, step);
    }
}

/* T5: a full barrier, then the value, then the news of it.  Into memory that was registered where it lies the kernel copies the
 * word, perhaps byte by byte: whoever looks at it before the news may see a part of it.  0, or a failure in *out. */
int32_t shm_signal_store(hxa_link *link, const hxa_batch *batch, shm_outcome *out) {
    uint8_t *word = batch->signal->base + batch->signal_off;
    *out = (shm_outcome){.failed = -1};
    if (batch->signal->kind == SHM_REMOTE) {
        struct iovec here = {(void *)(uintptr_t)&batch->signal_value, 8}, there = {word, 8};
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        const ssize_t got = vm_move(link, HXA_WRITE, &here, &there, 1);
        if (got != 8) {
            vm_failed(out, got < 0 ? (int)-got : EFAULT, 0);
            out->failed = -1;
            return out->status;
        }
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    } else {
        shm_store_sc((uint64_t *)(void *)word, batch->signal_value);
    }
    shm_add_sc(&link->peer->signals, 1u);
    shm_add(&link->self->others.signals_sent, 1);
    return 0;
}

/* A copy thread, when all chunks of the op are joined: signal, notification, end.  op->status tells if the data arrived. */
void shm_op_landed(hxa_op *op) {
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
            shm_link_wake(link);
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

/* ---- submit ---------------------------------------------------------------------------------------------------------- */

static int check_desc(const hxa_link *link, const hxa_desc *desc, uint32_t right) {
    const hxa_mem *remote = desc->rmem, *local = desc->lmem;
    if (remote == NULL || remote->link != link || desc->len == 0) return -HXA_E_INVALID;
    if (!(remote->rights & right)) return -HXA_E_RIGHTS;
    if (desc->len > remote->size || desc->roff > remote->size - desc->len) return -HXA_E_RANGE;
    if (local == NULL) return desc->loff == 0 || desc->loff + desc->len < desc->loff ? -HXA_E_INVALID : 0;
    if (local->self != link->self || local->link != NULL) return -HXA_E_INVALID;
    return desc->len > local->size || desc->loff > local->size - desc->len ? -HXA_E_RANGE : 0;
}

static int check_signal(const hxa_link *link, const hxa_batch *batch) {
    const hxa_mem *mem = batch->signal;
    if (mem->link != link || batch->signal_off % 8 != 0) return -HXA_E_INVALID;
    if (!(mem->rights & HXA_RIGHT_WRITE)) return -HXA_E_RIGHTS;
    return mem->size < 8 || batch->signal_off > mem->size - 8 ? -HXA_E_RANGE : 0;
}

/* The core has checked all this; a mistake there must not become a wild write here. */
static int check(const hxa_link *link, const hxa_batch *batch) {
    if (batch->verb > HXA_WRITE || batch->n > SHM_DESCRIPTORS) return -HXA_E_INVALID;
    const uint32_t right = batch->verb == HXA_READ ? HXA_RIGHT_READ : HXA_RIGHT_WRITE;
    uint64_t bytes = 0;
    for (size_t i = 0; i < batch->n; i++) {
        const int status = check_desc(link, &batch->desc[i], right);
        if (status != 0) return status;
        bytes += batch->desc[i].len;
    }
    if (bytes != batch->bytes) return -HXA_E_INVALID;
    if (batch->signal != NULL) {
        const int status = check_signal(link, batch);
        if (status != 0) return status;
    }
    if (batch->topic != NULL) {
        if ((uint64_t)batch->topic_len + batch->note_len > link->note_bytes) return -HXA_E_RANGE;
        if (shm_load(&link->waiting_n) >= link->self->waiting_limit) return -HXA_E_BUSY;
    } else if (batch->n == 0 && batch->signal == NULL) {
        return -HXA_E_INVALID;
    }
    return 0;
}

/* An inline copy that failed in the middle: accepted after all, and over. */
static int fail_inline(hxa_link *link, const hxa_batch *batch, hxa_op *op, const shm_outcome *out) {
    shm_op_accept(op, link, batch, SHM_COPY);
    shm_job_of(op)->state = SHM_FINAL;
    op->status = out->status;
    op->native = out->native;
    op->scope = out->scope;
    op->failed = out->failed;
    shm_store(&op->bytes, out->bytes);
    shm_op_finish(op);
    return HXA_PENDING;
}

int shm_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op) {
    hxa_instance *self = link->self;
    if (shm_load_acq(&link->state) != SHM_UP || shm_load_acq(&link->peer->fence) != 0) return -HXA_E_LINK;
    int status = check(link, batch);
    if (status != 0) return status;
    const int paced = shm_load(&link->pace) != 0;      /* only threads can wait */
    if (batch->n != 0 && (paced || batch->bytes + (uint64_t)batch->n * DESCRIPTOR_COST > self->inline_bytes)) {
        const uint64_t chunks = batch->bytes / self->chunk_bytes + batch->n / SHM_CHUNK_DESCRIPTORS + 1;
        status = shm_pool_ready(self, chunks);
        if (status != 0) return status;
        shm_op_accept(op, link, batch, SHM_COPY);
        shm_pool_push(self, op);
        return HXA_PENDING;
    }
    if (batch->n != 0) {
        shm_outcome out;
        shm_copy(link, batch, 0, 0, batch->bytes, &out);
        shm_bump(batch->verb == HXA_READ ? &self->loop.bytes_read : &self->loop.bytes_written, out.bytes);
        if (out.status != 0) return fail_inline(link, batch, op, &out);
    }
    if (batch->signal != NULL) {
        shm_outcome out;
        if (shm_signal_store(link, batch, &out) != 0) return fail_inline(link, batch, op, &out);
        if (batch->topic == NULL) shm_link_wake(link);
    }
    shm_bump(&self->loop.ops_inline, 1);
    if (batch->topic == NULL) return HXA_DONE;
    status = shm_notes_send(link, batch, op);
    if (status == HXA_PENDING && batch->signal != NULL) shm_link_wake(link);
    return status;
}
