/* The plan: which rules apply to which operation, decided by counting and by a seeded hash, so that a run can be repeated. */
#include "plan.h"

#include <string.h>

/* splitmix64's finalizer over three words.  It has no state, so that no rule changes the numbers of another. */
uint64_t faulty_random(uint64_t seed, uint64_t a, uint64_t b) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u * (a + 1) + 0xd1342543de82ef95u * (b + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint32_t verb_of(const hxa_batch *batch) {
    if (batch->n == 0) return FAULTY_BARE;
    return batch->verb == HXA_READ ? FAULTY_READS : FAULTY_WRITES;
}

/* Return 1 if the rule applies to this operation.  `*n` is the number of the operation among those that the rule counts. */
static int applies(faulty_rule *rule, uint32_t index, uint32_t verb, uint64_t seed, uint64_t *n) {
    if (!(rule->verbs & verb)) return 0;
    *n = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_RELAXED);
    if (*n < rule->first) return 0;
    const uint64_t since = *n - rule->first, every = rule->every ? rule->every : 1;
    if (since % every != 0 || (rule->count != 0 && since / every >= rule->count)) return 0;
    return rule->chance >= 1000000 || faulty_random(seed, 2 * index, *n) % 1000000 < rule->chance;
}

static void apply(const faulty_rule *rule, faulty_effects *effects, uint64_t random) {
    switch (rule->kind) {
    case FAULTY_DELAY: {
        const uint64_t delay = rule->high > rule->low ? rule->low + random % (rule->high - rule->low + 1) : rule->low;
        if (rule->part == FAULTY_OUTCOME) effects->outcome_delay += delay;
        else if (rule->part == FAULTY_NOTE) effects->note_delay += delay;
        else effects->delay += delay;
        break;
    }
    case FAULTY_BANDWIDTH:
        if (rule->low != 0 && (effects->bandwidth == 0 || rule->low < effects->bandwidth)) effects->bandwidth = rule->low;
        break;
    case FAULTY_LATE: effects->late = 1; break;
    case FAULTY_HOLD: effects->hold = 1; break;
    case FAULTY_STUCK: effects->stuck = 1; break;
    case FAULTY_FAIL:
        if (effects->fail) break;
        effects->fail = 1;
        effects->status = rule->status;
        effects->native = rule->native;
        effects->index = rule->index;
        effects->scope = rule->scope;
        break;
    case FAULTY_REORDER:
        effects->window = rule->low;
        effects->within = rule->high;
        break;
    case FAULTY_DROP: effects->drop = 1; break;
    case FAULTY_BUSY: effects->busy = 1; break;
    case FAULTY_PENDING: effects->pending = 1; break;
    case FAULTY_STALL: effects->stall = rule->low + 1; break;
    default: return;
    }
    effects->any = 1;
}

void faulty_plan_batch(faulty_block *block, uint64_t seed, const hxa_batch *batch, faulty_effects *effects, uint64_t *number) {
    *number = __atomic_add_fetch(&block->ops, 1, __ATOMIC_RELAXED);
    faulty_plan_verb(block, seed, verb_of(batch), effects);
}

void faulty_plan_verb(faulty_block *block, uint64_t seed, uint32_t verb, faulty_effects *effects) {
    const uint32_t rules = faulty_load(&block->rules);
    memset(effects, 0, sizeof *effects);
    effects->index = -1;
    for (uint32_t i = 0; i < rules && i < FAULTY_RULES; i++) {
        uint64_t n;
        if (applies(&block->rule[i], i, verb, seed, &n)) apply(&block->rule[i], effects, faulty_random(seed, 2 * i + 1, n));
    }
}
