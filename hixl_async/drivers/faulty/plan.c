/* The plan: which op meets which fault, decided by counting and by a seeded hash, so that a run can be repeated. */
#include "faulty.h"

/* ---- fates ------------------------------------------------------------------------------------------------------------ */

/* splitmix64's finalizer over three words: no state, so rules never disturb each other's numbers. */
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

/* Does the rule meet this op?  `*n` is the op's number among those that the rule looks at. */
static int meets(faulty_rule *rule, uint32_t index, uint32_t verb, uint64_t seed, uint64_t *n) {
    if (!(rule->verbs & verb)) return 0;
    *n = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_RELAXED);
    if (*n < rule->first) return 0;
    const uint64_t since = *n - rule->first, every = rule->every ? rule->every : 1;
    if (since % every != 0 || (rule->count != 0 && since / every >= rule->count)) return 0;
    return rule->chance >= 1000000 || faulty_random(seed, 2 * index, *n) % 1000000 < rule->chance;
}

static void apply(const faulty_rule *rule, faulty_fate *fate, uint64_t random) {
    switch (rule->kind) {
    case FAULTY_DELAY: {
        const uint64_t delay = rule->high > rule->low ? rule->low + random % (rule->high - rule->low + 1) : rule->low;
        if (rule->part == FAULTY_OUTCOME) fate->outcome_delay += delay;
        else if (rule->part == FAULTY_NOTE) fate->note_delay += delay;
        else fate->delay += delay;
        break;
    }
    case FAULTY_BANDWIDTH:
        if (rule->low != 0 && (fate->bandwidth == 0 || rule->low < fate->bandwidth)) fate->bandwidth = rule->low;
        break;
    case FAULTY_LATE: fate->late = 1; break;
    case FAULTY_HOLD: fate->hold = 1; break;
    case FAULTY_STUCK: fate->stuck = 1; break;
    case FAULTY_FAIL:
        if (fate->fail) break;
        fate->fail = 1;
        fate->status = rule->status;
        fate->native = rule->native;
        fate->index = rule->index;
        fate->scope = rule->scope;
        break;
    case FAULTY_REORDER:
        fate->window = rule->low;
        fate->within = rule->high;
        break;
    case FAULTY_DROP: fate->drop = 1; break;
    case FAULTY_BUSY: fate->busy = 1; break;
    case FAULTY_PENDING: fate->pending = 1; break;
    case FAULTY_STALL: fate->stall = rule->low + 1; break;
    default: return;
    }
    fate->any = 1;
}

void faulty_fate_of(hxa_instance *self, const hxa_batch *batch, faulty_fate *fate, uint64_t *number) {
    *number = __atomic_add_fetch(&self->block->ops, 1, __ATOMIC_RELAXED);
    faulty_fate_of_call(self, verb_of(batch), fate);
}

void faulty_fate_of_call(hxa_instance *self, uint32_t verb, faulty_fate *fate) {
    faulty_block *block = self->block;
    const uint32_t rules = faulty_load(&block->rules);
    memset(fate, 0, sizeof *fate);
    fate->index = -1;
    for (uint32_t i = 0; i < rules && i < FAULTY_RULES; i++) {
        uint64_t n;
        if (meets(&block->rule[i], i, verb, self->seed, &n)) apply(&block->rule[i], fate, faulty_random(self->seed, 2 * i + 1, n));
    }
}

/* ---- commands: Python calls them by the address in the block ---------------------------------------------------------- */

/* All instances of this process, and through them all links.  The lock is held while they are told, so that none goes meanwhile. */
static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static hxa_instance *instances;

static faulty_flight *next_held(hxa_instance *self, uint64_t after) {
    faulty_flight *oldest = NULL;
    for (hxa_link *link = self->links; link != NULL; link = link->next)
        for (faulty_node *node = link->flights.next; node != &link->flights; node = node->next) {
            faulty_flight *flight = faulty_flight_of(node);
            if (flight->held && flight->number > after && (oldest == NULL || flight->number < oldest->number)) oldest = flight;
        }
    for (faulty_node *node = self->calls.next; oldest == NULL && node != &self->calls; node = node->next)
        if (faulty_flight_of(node)->held && faulty_flight_of(node)->number > after) oldest = faulty_flight_of(node);
    return oldest;
}

static void open_gate(faulty_flight *flight) {
    faulty_count(&flight->self->block->released);
    faulty_ungate(flight);
    if (flight->link != NULL) faulty_link_ring(flight->link);
}

static void release_all(faulty_block *block) {
    for (hxa_instance *self = instances; self != NULL; self = self->next) {
        if (self->block != block) continue;
        pthread_mutex_lock(&self->lock);
        for (faulty_flight *flight; (flight = next_held(self, 0)) != NULL;) open_gate(flight);
        pthread_mutex_unlock(&self->lock);
    }
}

/* The n-th oldest of what is held, over all engines that use the plan. */
static void release_one(faulty_block *block, uint64_t n) {
    uint64_t after = 0, oldest = 0;
    hxa_instance *owner = NULL;
    for (; n != 0; n--, after = oldest) {
        owner = NULL;
        for (hxa_instance *self = instances; self != NULL; self = self->next) {
            if (self->block != block) continue;
            pthread_mutex_lock(&self->lock);
            const faulty_flight *flight = next_held(self, after);
            if (flight != NULL && (owner == NULL || flight->number < oldest)) {
                owner = self;
                oldest = flight->number;
            }
            pthread_mutex_unlock(&self->lock);
        }
        if (owner == NULL) return;
    }
    if (owner == NULL) return;
    pthread_mutex_lock(&owner->lock);
    faulty_flight *flight = next_held(owner, oldest - 1);
    if (flight != NULL && flight->number == oldest) open_gate(flight);
    pthread_mutex_unlock(&owner->lock);
}

static void tell_all(faulty_block *block, uint32_t what, uint64_t argument) {
    for (hxa_instance *self = instances; self != NULL; self = self->next)
        if (self->block == block)
            for (hxa_link *link = self->links; link != NULL; link = link->next) {
                if (what == FAULTY_BREAK) faulty_link_break(link);
                else faulty_say(link, (const faulty_saying *)(uintptr_t)argument);
            }
}

/* On the loop's thread the released work is submitted before this returns; elsewhere when the loop polls. */
static void command(faulty_block *block, uint32_t what, uint64_t argument) {
    enum { MOST = 64 };
    hxa_instance *mine[MOST];
    size_t n = 0;
    pthread_mutex_lock(&registry);
    if (what == FAULTY_RELEASE && argument == 0) release_all(block);
    else if (what == FAULTY_RELEASE) release_one(block, argument);
    else tell_all(block, what, argument);
    for (hxa_instance *self = instances; self != NULL && n < MOST; self = self->next)
        if (self->block == block && pthread_equal(self->loop, pthread_self())) mine[n++] = self;
    pthread_mutex_unlock(&registry);
    for (size_t i = 0; i < n; i++)
        for (hxa_link *link = mine[i]->links; link != NULL; link = link->next) {
            while (faulty_pump(link, UINT32_MAX)) {}
            faulty_stops_issue(link);
        }
}

void faulty_registry_add(hxa_instance *self) {
    pthread_mutex_lock(&registry);
    self->next = instances;
    instances = self;
    faulty_store(&self->block->command, (uint64_t)(uintptr_t)command);
    pthread_mutex_unlock(&registry);
}

static void forget(hxa_instance *self) {
    hxa_instance **at = &instances;
    while (*at != NULL && *at != self) at = &(*at)->next;
    if (*at != NULL) *at = self->next;
}

void faulty_registry_remove(hxa_instance *self) {
    pthread_mutex_lock(&registry);
    forget(self);
    pthread_mutex_unlock(&registry);
}

/* In the child of a fork: whoever held the lock did not come along. */
void faulty_registry_forked(hxa_instance *self) {
    pthread_mutex_init(&registry, NULL);
    forget(self);
}

void faulty_registry_add_link(hxa_link *link) {
    pthread_mutex_lock(&registry);
    link->next = link->self->links;
    link->self->links = link;
    pthread_mutex_unlock(&registry);
}

void faulty_registry_remove_link(hxa_link *link) {
    pthread_mutex_lock(&registry);
    hxa_link **at = &link->self->links;
    while (*at != link) at = &(*at)->next;
    *at = link->next;
    pthread_mutex_unlock(&registry);
}
