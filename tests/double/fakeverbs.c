/* A double of libibverbs.so.1 for tests: devices fake0, fake1, ... whose RDMA READ is a memcpy inside
 * one process, done by a thread of the device some time after the post, as a NIC does it.
 *
 *   gcc -O2 -Wall -shared -fPIC -Wl,-soname,libibverbs.so.1 -o libibverbs.so.1 fakeverbs.c -lpthread
 *
 * It is strict where a NIC is: keys and bounds of memory regions, access rights, states of queue
 * pairs and the order of their changes, the queue pair and the port at the other end, full queues.
 * It does to order what NICs do seldom: see fake_set. All that ibv_destroy_qp has returned for is
 * never written again; all else is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#undef ibv_reg_mr
#undef ibv_query_port
#undef ibv_create_ah

#define DEVICES 8
#define REGIONS 4096
#define PAIRS 4096

struct job;
struct device {
    struct ibv_device dev;
    long delay_us, fail_in, fail_status, reorder, mute, sync, nocopy, join_fails; /* see fake_set */
    struct job *head;
    pthread_t thread;
    int has_thread;
    pthread_cond_t more;
};
struct context { struct ibv_context c; struct device *device; };
struct channel { struct ibv_comp_channel c; int write_fd; };
struct cq { struct ibv_cq cq; struct ibv_wc *ring; int *weights; unsigned head, tail, cap; int armed; };
struct pair {
    struct ibv_qp qp;
    struct device *device;
    unsigned dest, access, max_wr, used, rd_atomic, dest_rd_atomic;
    int state, sig_all, dest_device;
};
struct region { struct ibv_mr mr; struct device *device; unsigned access; int index; };
struct job { struct job *next; struct pair *pair; int count; struct ibv_send_wr wr[]; };

static struct device devices[DEVICES];
static struct region *regions[REGIONS];
static struct pair *pairs[PAIRS];
static long device_count = 2, alive_pairs, alive_regions, alive_cqs, alive_channels, posts, requests;
static long destroy_fails, writes_remote;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* delay_us   each chain takes so long          fail_in   the n-th chain from now fails; -1: each
 * fail_status its status, in the midst of it   reorder   the newest chain goes first
 * mute       nothing is done until it is 0     sync      done inside the post
 * nocopy     done without moving bytes         devices, destroy_fails: of all devices
 * join_fails so many queue pairs do not find the other end                                           */
void fake_set(int number, const char *what, long value)
{
    pthread_mutex_lock(&lock);
    struct device *d = &devices[number];
    if (!strcmp(what, "delay_us")) d->delay_us = value;
    if (!strcmp(what, "fail_in")) d->fail_in = value;
    if (!strcmp(what, "fail_status")) d->fail_status = value;
    if (!strcmp(what, "reorder")) d->reorder = value;
    if (!strcmp(what, "mute")) d->mute = value;
    if (!strcmp(what, "sync")) d->sync = value;
    if (!strcmp(what, "nocopy")) d->nocopy = value;
    if (!strcmp(what, "join_fails")) d->join_fails = value;
    if (!strcmp(what, "devices")) device_count = value;
    if (!strcmp(what, "destroy_fails")) destroy_fails = value;
    if (d->has_thread) pthread_cond_broadcast(&d->more);
    pthread_mutex_unlock(&lock);
}

long fake_get(int number, const char *what)
{
    pthread_mutex_lock(&lock);
    long value = -1;
    if (!strcmp(what, "pairs")) value = alive_pairs;
    if (!strcmp(what, "regions")) value = alive_regions;
    if (!strcmp(what, "cqs")) value = alive_cqs;
    if (!strcmp(what, "channels")) value = alive_channels;
    if (!strcmp(what, "posts")) value = posts;
    if (!strcmp(what, "requests")) value = requests;
    if (!strcmp(what, "remote_write")) value = writes_remote;
    if (!strcmp(what, "waiting")) {
        value = 0;
        for (struct job *j = devices[number].head; j; j = j->next) value++;
    }
    if (!strcmp(what, "device_pairs")) {
        value = 0;
        for (int i = 0; i < PAIRS; i++) value += pairs[i] && pairs[i]->device == &devices[number];
    }
    pthread_mutex_unlock(&lock);
    return value;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
    for (int i = 0; i < device_count; i++) {
        snprintf(devices[i].dev.name, sizeof devices[i].dev.name, "fake%d", i);
        devices[i].dev.node_type = IBV_NODE_CA;
        devices[i].dev.transport_type = IBV_TRANSPORT_IB;
        list[i] = &devices[i].dev;
    }
    if (count) *count = (int)device_count;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
__be64 ibv_get_device_guid(struct ibv_device *d) { return (__be64)(uintptr_t)d; }

/* All below is called with the lock held, up to the next such line. */
static void push(struct cq *q, struct ibv_wc wc, int weight)
{
    if (q->head - q->tail >= q->cap) { fprintf(stderr, "fakeverbs: completion queue overrun\n"); abort(); }
    q->weights[q->head % q->cap] = weight;
    q->ring[q->head++ % q->cap] = wc;
    if (q->armed && q->cq.channel) {
        uint64_t event = (uintptr_t)q;
        q->armed = 0;
        if (write(((struct channel *)q->cq.channel)->write_fd, &event, 8) != 8) abort();
    }
}

static struct region *find(unsigned key, struct device *d, uint64_t address, size_t size, unsigned access)
{
    struct region *r = key / 16 < REGIONS ? regions[key / 16] : NULL;
    if (!r || r->mr.lkey != key || r->device != d || (r->access & access) != access) return NULL;
    uint64_t begin = (uintptr_t)r->mr.addr;
    return address >= begin && address + size <= begin + r->mr.length ? r : NULL;
}

static int read_once(struct pair *p, struct ibv_send_wr *wr)
{
    struct device *d = p->device;
    struct pair *far = p->dest < PAIRS ? pairs[p->dest] : NULL;
    size_t size = 0;
    if (!far || far->state < IBV_QPS_RTR || far->state == IBV_QPS_ERR || far->dest != p->qp.qp_num
        || far->device != &devices[p->dest_device])
        return IBV_WC_RETRY_EXC_ERR;
    for (int i = 0; i < wr->num_sge; i++) {
        struct ibv_sge *s = &wr->sg_list[i];
        if (!find(s->lkey, d, s->addr, s->length, IBV_ACCESS_LOCAL_WRITE)) return IBV_WC_LOC_PROT_ERR;
        size += s->length;
    }
    if (!(far->access & IBV_ACCESS_REMOTE_READ) || !far->dest_rd_atomic || !p->rd_atomic
        || !find(wr->wr.rdma.rkey, far->device, wr->wr.rdma.remote_addr, size, IBV_ACCESS_REMOTE_READ))
        return IBV_WC_REM_ACCESS_ERR;
    uint64_t from = wr->wr.rdma.remote_addr;
    for (int i = 0; i < wr->num_sge && !d->nocopy; i++) {
        memcpy((void *)(uintptr_t)wr->sg_list[i].addr, (void *)(uintptr_t)from, wr->sg_list[i].length);
        from += wr->sg_list[i].length;
    }
    return IBV_WC_SUCCESS;
}

static void run(struct pair *p, struct ibv_send_wr *wr, int count)
{
    int weight = 0, done = 0, fails = p->device->fail_in < 0;
    if (p->device->fail_in > 0) fails = --p->device->fail_in == 0;
    for (; wr; wr = wr->next, done++) {
        int status = IBV_WC_WR_FLUSH_ERR;
        weight++;
        if (p->state != IBV_QPS_ERR) {
            status = fails && done >= count / 2 ? (int)p->device->fail_status : read_once(p, wr);
            if (status) p->state = IBV_QPS_ERR;
        }
        if (status || p->sig_all || (wr->send_flags & IBV_SEND_SIGNALED)) {
            struct ibv_wc wc = { .wr_id = wr->wr_id, .status = status, .opcode = IBV_WC_RDMA_READ, .qp_num = p->qp.qp_num };
            push((struct cq *)p->qp.send_cq, wc, weight);
            weight = 0;
        }
    }
}

static void drop(struct job *job)
{
    for (int i = 0; i < job->count; i++) free(job->wr[i].sg_list);
    free(job);
}

static struct job *take(struct device *d)
{
    struct job **at = &d->head;
    while (d->reorder && *at && (*at)->next) at = &(*at)->next;
    struct job *job = *at;
    if (job) *at = job->next;
    return job;
}

/* From here on calls take the lock themselves. */
static void *work(void *x)
{
    struct device *d = x;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!d->head || d->mute) pthread_cond_wait(&d->more, &lock);
        long delay = d->delay_us;
        pthread_mutex_unlock(&lock);
        if (delay) usleep((useconds_t)delay);
        pthread_mutex_lock(&lock);
        struct job *job = d->mute ? NULL : take(d); /* what was destroyed meanwhile is not there */
        if (!job) continue;
        run(job->pair, job->wr, job->count);
        drop(job);
    }
    return NULL;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct pair *p = (struct pair *)qp;
    struct device *d = p->device;
    int count = 0;
    for (struct ibv_send_wr *w = wr; w; w = w->next) count++;
    pthread_mutex_lock(&lock);
    *bad = wr;
    int code = p->state < IBV_QPS_RTS ? EINVAL : p->used + count > p->max_wr ? ENOMEM : 0;
    if (code) { pthread_mutex_unlock(&lock); return code; }
    posts++;
    requests += count;
    p->used += count;
    if (d->sync) {
        run(p, wr, count);
        pthread_mutex_unlock(&lock);
        return 0;
    }
    struct job *job = calloc(1, sizeof *job + count * sizeof *wr), **at = &d->head;
    job->pair = p;
    job->count = count;
    for (int i = 0; wr; wr = wr->next, i++) {
        job->wr[i] = *wr;
        job->wr[i].sg_list = malloc(wr->num_sge * sizeof *wr->sg_list);
        memcpy(job->wr[i].sg_list, wr->sg_list, wr->num_sge * sizeof *wr->sg_list);
        job->wr[i].next = i + 1 < count ? &job->wr[i + 1] : NULL;
    }
    while (*at) at = &(*at)->next;
    *at = job;
    if (!d->has_thread) {
        pthread_cond_init(&d->more, NULL);
        d->has_thread = 1;
        pthread_create(&d->thread, NULL, work, d);
    }
    pthread_cond_signal(&d->more);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
    struct cq *q = (struct cq *)cq;
    int found = 0;
    pthread_mutex_lock(&lock);
    for (; found < count && q->tail != q->head; q->tail++) {
        struct ibv_wc *one = &q->ring[q->tail % q->cap];
        struct pair *p = one->qp_num < PAIRS ? pairs[one->qp_num] : NULL;
        if (p) p->used -= q->weights[q->tail % q->cap];
        wc[found++] = *one;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static int req_notify(struct ibv_cq *cq, int solicited)
{
    (void)solicited;
    pthread_mutex_lock(&lock);
    ((struct cq *)cq)->armed = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int post_recv(struct ibv_qp *q, struct ibv_recv_wr *w, struct ibv_recv_wr **b) { (void)q; *b = w; return ENOSYS; }

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
    struct context *c = calloc(1, sizeof *c);
    c->device = (struct device *)d;
    c->c.device = d;
    c->c.num_comp_vectors = 1;
    c->c.async_fd = eventfd(0, EFD_CLOEXEC);
    c->c.cmd_fd = -1;
    c->c.ops.poll_cq = poll_cq;
    c->c.ops.req_notify_cq = req_notify;
    c->c.ops.post_send = post_send;
    c->c.ops.post_recv = post_recv;
    return &c->c;
}
int ibv_close_device(struct ibv_context *c) { close(c->async_fd); free(c); return 0; }

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
    (void)c;
    memset(a, 0, sizeof *a);
    a->max_qp_wr = 8192; a->max_sge = 30; a->max_qp_rd_atom = 16; a->phys_port_cnt = 1;
    return 0;
}
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *x)
{
    struct ibv_port_attr *a = (void *)x;
    (void)c; (void)port;
    a->state = IBV_PORT_ACTIVE; a->max_mtu = a->active_mtu = IBV_MTU_4096;
    a->link_layer = IBV_LINK_LAYER_ETHERNET; a->gid_tbl_len = 2;
    return 0;
}
int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *g)
{
    (void)port; (void)index;
    memset(g, 0, 16);
    g->raw[10] = g->raw[11] = 255; g->raw[12] = 10; g->raw[15] = 1;
    g->raw[14] = (uint8_t)(((struct context *)c)->device - devices);
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) { struct ibv_pd *p = calloc(1, sizeof *p); p->context = c; return p; }
int ibv_dealloc_pd(struct ibv_pd *p) { free(p); return 0; }

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t size, uint64_t iova, unsigned access)
{
    (void)iova;
    pthread_mutex_lock(&lock);
    int index = 1;
    while (index < REGIONS && regions[index]) index++;
    if (index == REGIONS) { pthread_mutex_unlock(&lock); errno = ENOMEM; return NULL; }
    struct region *r = calloc(1, sizeof *r);
    r->mr.context = pd->context; r->mr.pd = pd; r->mr.addr = address; r->mr.length = size;
    r->mr.lkey = r->mr.rkey = (uint32_t)index * 16 + 5;
    r->device = ((struct context *)pd->context)->device;
    r->access = access;
    r->index = index;
    regions[index] = r;
    alive_regions++;
    if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) writes_remote++;
    pthread_mutex_unlock(&lock);
    return &r->mr;
}
int ibv_dereg_mr(struct ibv_mr *mr)
{
    pthread_mutex_lock(&lock);
    regions[((struct region *)mr)->index] = NULL;
    alive_regions--;
    pthread_mutex_unlock(&lock);
    free(mr);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
    struct channel *ch = calloc(1, sizeof *ch);
    int fds[2];
    if (pipe2(fds, O_CLOEXEC)) { free(ch); return NULL; }
    ch->c.context = c; ch->c.fd = fds[0]; ch->write_fd = fds[1];
    __sync_fetch_and_add(&alive_channels, 1);
    return &ch->c;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
    close(ch->fd); close(((struct channel *)ch)->write_fd); free(ch);
    __sync_fetch_and_sub(&alive_channels, 1);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int size, void *user, struct ibv_comp_channel *ch, int vector)
{
    (void)vector;
    struct cq *q = calloc(1, sizeof *q);
    q->cap = size; q->ring = calloc(size, sizeof *q->ring); q->weights = calloc(size, sizeof *q->weights);
    q->cq.context = c; q->cq.channel = ch; q->cq.cq_context = user; q->cq.cqe = size;
    __sync_fetch_and_add(&alive_cqs, 1);
    return &q->cq;
}
int ibv_destroy_cq(struct ibv_cq *cq)
{
    struct cq *q = (struct cq *)cq;
    free(q->ring); free(q->weights); free(q);
    __sync_fetch_and_sub(&alive_cqs, 1);
    return 0;
}
int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **user)
{
    uint64_t event;
    if (read(ch->fd, &event, 8) != 8) return -1;
    *cq = (void *)(uintptr_t)event;
    *user = (*cq)->cq_context;
    return 0;
}
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n) { (void)cq; (void)n; }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
    static unsigned next = 100;
    pthread_mutex_lock(&lock);
    for (int tries = 0; pairs[next % PAIRS] && tries < PAIRS; tries++) next++;
    struct pair *p = calloc(1, sizeof *p);
    p->qp.context = pd->context; p->qp.pd = pd; p->qp.send_cq = a->send_cq; p->qp.recv_cq = a->recv_cq;
    p->qp.qp_type = a->qp_type; p->sig_all = a->sq_sig_all; p->max_wr = a->cap.max_send_wr;
    p->device = ((struct context *)pd->context)->device;
    p->qp.qp_num = next % PAIRS;
    pairs[next++ % PAIRS] = p;
    alive_pairs++;
    pthread_mutex_unlock(&lock);
    return &p->qp;
}
int ibv_destroy_qp(struct ibv_qp *qp)
{
    struct pair *p = (struct pair *)qp;
    pthread_mutex_lock(&lock);
    if (destroy_fails > 0) { destroy_fails--; pthread_mutex_unlock(&lock); return EBUSY; }
    for (struct job **at = &p->device->head; *at;) {
        struct job *job = *at;
        if (job->pair == p) { *at = job->next; drop(job); } else at = &job->next;
    }
    pairs[p->qp.qp_num] = NULL;
    alive_pairs--;
    pthread_mutex_unlock(&lock);
    free(p);
    return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
    struct pair *p = (struct pair *)qp;
    pthread_mutex_lock(&lock);
    int code = 0, to = mask & IBV_QP_STATE ? (int)a->qp_state : p->state;
    if (to != IBV_QPS_ERR && to != p->state + 1) code = EINVAL;
    if (to == IBV_QPS_INIT) p->access = a->qp_access_flags;
    if (to == IBV_QPS_RTR) {
        if (p->device->join_fails > 0) { p->device->join_fails--; code = EHOSTUNREACH; }
        if (!(mask & IBV_QP_DEST_QPN) || !(mask & IBV_QP_AV) || !a->ah_attr.is_global || a->ah_attr.grh.hop_limit < 2
            || a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096) code = EINVAL;
        p->dest = a->dest_qp_num;
        p->dest_rd_atomic = a->max_dest_rd_atomic;
        p->dest_device = a->ah_attr.grh.dgid.raw[14] % DEVICES; /* as ibv_query_gid */
    }
    if (to == IBV_QPS_RTS) p->rd_atomic = a->max_rd_atomic;
    if (!code) p->state = qp->state = to;
    pthread_mutex_unlock(&lock);
    return code;
}
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *i)
{
    (void)mask;
    memset(a, 0, sizeof *a); memset(i, 0, sizeof *i);
    a->qp_state = ((struct pair *)qp)->state;
    return 0;
}

int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *e) { (void)c; (void)e; errno = EAGAIN; return -1; }
void ibv_ack_async_event(struct ibv_async_event *e) { (void)e; }
const char *ibv_event_type_str(enum ibv_event_type t) { (void)t; return "event"; }
const char *ibv_wc_status_str(enum ibv_wc_status s) { static __thread char b[24]; snprintf(b, 24, "status %d", s); return b; }
struct ibv_ah *ibv_create_ah(struct ibv_pd *p, struct ibv_ah_attr *a) { (void)p; (void)a; errno = ENOSYS; return NULL; }
int ibv_destroy_ah(struct ibv_ah *a) { (void)a; return ENOSYS; }
struct ibv_srq *ibv_create_srq(struct ibv_pd *p, struct ibv_srq_init_attr *a) { (void)p; (void)a; errno = ENOSYS; return NULL; }
int ibv_destroy_srq(struct ibv_srq *s) { (void)s; return ENOSYS; }
int ibv_modify_srq(struct ibv_srq *s, struct ibv_srq_attr *a, int m) { (void)s; (void)a; (void)m; return ENOSYS; }
int ibv_query_srq(struct ibv_srq *s, struct ibv_srq_attr *a) { (void)s; (void)a; return ENOSYS; }
