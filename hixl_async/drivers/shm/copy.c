#include "copy.h"

#ifdef __x86_64__
#include <emmintrin.h>
#endif

#include "region.h"

enum {
    STREAM_LEAST = 1024,               /* bytes of a piece for which streaming stores are worth their fence */
    VM_PIECES = 64                     /* descriptors per process_vm_* call */
};

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

static uint8_t *local_at(const hxa_desc *desc) {
    return desc->lmem != NULL ? desc->lmem->base + desc->loff : (uint8_t *)(uintptr_t)desc->loff;
}

/* Copy past the caches: a batch that they cannot hold anyway would fetch every target line only to overwrite it.  ARM cores
 * notice that by themselves, and memcpy sees single chunks only. */
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

/* One call for the descriptors that follow and lie in registered memory.  A short answer ends before the first byte that cannot
 * be reached, so the next call returns the reason. */
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
    const ssize_t got = shm_process_move(&link->process, batch->verb, here, there, n);
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

int32_t shm_signal_store(hxa_link *link, const hxa_batch *batch, shm_outcome *out) {
    uint8_t *word = batch->signal->base + batch->signal_off;
    *out = (shm_outcome){.failed = -1};
    if (batch->signal->kind == SHM_REMOTE) {
        struct iovec here = {(void *)(uintptr_t)&batch->signal_value, 8}, there = {word, 8};
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        const ssize_t got = shm_process_move(&link->process, HXA_WRITE, &here, &there, 1);
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
