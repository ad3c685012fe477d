#include "submit.h"

#include "copy.h"
#include "doorbell.h"
#include "notes.h"
#include "op.h"
#include "region.h"
#include "workers.h"

enum { DESCRIPTOR_COST = 64 };         /* what a descriptor costs the loop, in bytes that it could copy instead */

int shm_cancel(hxa_link *link, hxa_op *op) {
    if (__atomic_fetch_or(&shm_job_of(op)->state, SHM_CANCELLED, __ATOMIC_SEQ_CST) & SHM_FINAL) return 0;
    shm_pool_purge(&link->self->pool);
    if (shm_job_has_note(shm_job_of(op))) {
        shm_store_sc(&link->scrub, 1u);
        shm_notes_pump(link);
    }
    return 1;
}

uint64_t shm_progress(hxa_link *link, const hxa_op *op) {
    (void)link;
    return shm_load(&op->bytes);
}

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
        status = shm_workers_ready(self, batch->bytes, batch->n);
        if (status != 0) return shm_refuse(op, status);
        shm_op_accept(op, link, batch, SHM_COPY);
        shm_pool_push(&self->pool, op);
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
        if (batch->topic == NULL) shm_bell_wake(link);
    }
    shm_bump(&self->loop.ops_inline, 1);
    if (batch->topic == NULL) return HXA_DONE;
    status = shm_notes_send(link, batch, op);
    if (status == HXA_PENDING && batch->signal != NULL) shm_bell_wake(link);
    return status;
}
