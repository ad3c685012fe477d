#include "op.h"

void shm_op_accept(hxa_op *op, hxa_link *link, const void *what, uint16_t kind) {
    op->status = op->native = 0;
    op->scope = HXA_SCOPE_OP;
    op->failed = -1;
    shm_store(&op->bytes, 0);
    *shm_job_of(op) = (shm_job){.link = link, .what = what, .kind = kind};
    shm_add_sc(&link->refs, 1u);
    if (shm_job_has_note(shm_job_of(op))) shm_add_sc(&link->waiting_n, 1u);
    shm_bump(&link->self->loop.ops_queued, 1);
}

int32_t shm_op_decide(hxa_op *op) {
    const uint32_t before = __atomic_fetch_or(&shm_job_of(op)->state, SHM_FINAL, __ATOMIC_SEQ_CST);
    return before == SHM_CANCELLED ? HXA_E_CANCELLED : 0;
}

void shm_op_finish(hxa_op *op) {
    hxa_link *link = shm_job_of(op)->link;
    if (shm_job_has_note(shm_job_of(op))) shm_sub_sc(&link->waiting_n, 1u);
    hxa_finish(&link->self->sink, op);
    shm_link_unref(link);
}
