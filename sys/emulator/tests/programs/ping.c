/* A program as people write them for verbs, built with the header and linked with the emulator. It is both machines
 * of a mesh of two: connects a queue pair at each end of the cable and sends a message through. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(good) \
    do { \
        if (!(good)) { \
            fprintf(stderr, "line %d: %s\n", __LINE__, #good); \
            exit(1); \
        } \
    } while (0)

enum { PAGE = 16384, BYTES = 5000 };

struct end {
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_cq *queue;
    struct ibv_mr *region;
    struct ibv_qp *pair;
    union ibv_gid gid;
    char *memory;
};

static struct end open_end(struct ibv_device *device) {
    struct end end;
    CHECK(end.context = ibv_open_device(device));
    struct ibv_port_attr port;
    CHECK(ibv_query_port(end.context, 1, &port) == 0);
    CHECK(port.state == IBV_PORT_ACTIVE);
    CHECK(ibv_query_gid(end.context, 1, 1, &end.gid) == 0);
    CHECK(end.domain = ibv_alloc_pd(end.context));
    CHECK(end.queue = ibv_create_cq(end.context, 16, NULL, NULL, 0));
    CHECK(end.memory = aligned_alloc(PAGE, PAGE));
    CHECK(end.region = ibv_reg_mr(end.domain, end.memory, PAGE, IBV_ACCESS_LOCAL_WRITE));
    struct ibv_qp_init_attr init = {
        .send_cq = end.queue,
        .recv_cq = end.queue,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_UC,
    };
    CHECK(end.pair = ibv_create_qp(end.domain, &init));
    return end;
}

static void connect_end(struct end *end, struct end *peer) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_LOCAL_WRITE};
    CHECK(ibv_modify_qp(end->pair, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_4096;
    attr.dest_qp_num = peer->pair->qp_num;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = peer->gid;
    attr.ah_attr.grh.sgid_index = 1;
    attr.ah_attr.grh.hop_limit = 1;
    CHECK(ibv_modify_qp(end->pair, &attr,
        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) == 0);
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(end->pair, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
}

static struct ibv_wc wait_for(struct end *end) {
    struct ibv_wc done;
    int count;
    while ((count = ibv_poll_cq(end->queue, 1, &done)) == 0)
        ;
    CHECK(count == 1);
    CHECK(done.status == IBV_WC_SUCCESS);
    return done;
}

static void close_end(struct end *end) {
    CHECK(ibv_destroy_qp(end->pair) == 0);
    CHECK(ibv_dereg_mr(end->region) == 0);
    CHECK(ibv_destroy_cq(end->queue) == 0);
    CHECK(ibv_dealloc_pd(end->domain) == 0);
    CHECK(ibv_close_device(end->context) == 0);
    free(end->memory);
}

int main(void) {
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count == 2);
    printf("%s and %s\n", ibv_get_device_name(list[0]), ibv_get_device_name(list[1]));
    struct end a = open_end(list[0]), b = open_end(list[1]);
    connect_end(&a, &b);
    connect_end(&b, &a);

    memset(a.memory, 'x', BYTES);
    struct ibv_sge to = {.addr = (uintptr_t)b.memory, .length = 8192, .lkey = b.region->lkey};
    struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &to, .num_sge = 1}, *bad_receive;
    CHECK(ibv_post_recv(b.pair, &receive, &bad_receive) == 0);
    struct ibv_sge from = {.addr = (uintptr_t)a.memory, .length = BYTES, .lkey = a.region->lkey};
    struct ibv_send_wr send = {
        .wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
    }, *bad_send;
    CHECK(ibv_post_send(a.pair, &send, &bad_send) == 0);
    CHECK(wait_for(&a).wr_id == 2);
    struct ibv_wc done = wait_for(&b);
    CHECK(done.wr_id == 1 && done.byte_len == BYTES && done.opcode == IBV_WC_RECV);
    CHECK(memcmp(a.memory, b.memory, BYTES) == 0);
    CHECK(ibv_req_notify_cq(a.queue, 0) != 0);

    close_end(&a);
    close_end(&b);
    ibv_free_device_list(list);
    return 0;
}
